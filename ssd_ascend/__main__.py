"""`python -m ssd_ascend`: the same as the command `ssd-ascend`."""

from ssd_ascend.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
