"""A cable with a delay: passes bytes between its port and another, each way so many milliseconds later.

Arguments: port to relay to, delay in ms. Prints its own port. A program of its own, so that it keeps time while the
processes it connects are busy.
"""

from __future__ import annotations

import asyncio
import socket
import sys


async def one_way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Bytes leave `delay_s` after they came, in order."""
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    clock = asyncio.get_running_loop().time

    async def deliver() -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(0.0, due - clock()))
            if not data:
                writer.close()
                return
            writer.write(data)

    delivering = asyncio.create_task(deliver())
    data = b"?"
    while data:
        data = await reader.read(1 << 16)
        queue.put_nowait((clock() + delay_s, data))
    await delivering


async def main(port: int, delay_s: float) -> None:
    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        for each in (writer, far_writer):
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(one_way(reader, far_writer, delay_s), one_way(far_reader, writer, delay_s))

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]) / 1e3))
