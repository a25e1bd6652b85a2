// A pool of threads of our own, shared by all kernels.
//
// Why not OpenMP: its threads spin for milliseconds and its regions end when every thread has been scheduled, which is
// ruinous when a draft worker, a server and a target share few cores. Here work is taken piece by piece, the caller
// takes part, and a thread that gets no core is simply not waited for.
#pragma once

#include <cstdint>

namespace ssd {

// Runs work(context, piece) for piece in [0, pieces) on at most `threads` threads, the caller among them.
void run_pieces(int64_t pieces, int64_t threads, void (*work)(const void* context, int64_t piece), const void* context);

// The same for any callable taking the piece; alone when there is nothing to share.
template <typename Fn>
void parallel(int64_t pieces, int64_t threads, const Fn& fn) {
    if (threads <= 1 || pieces <= 1) {
        for (int64_t i = 0; i < pieces; ++i) fn(i);
        return;
    }
    run_pieces(
        pieces, threads, [](const void* context, int64_t i) { (*static_cast<const Fn*>(context))(i); }, &fn);
}

// The same for ranges [from, to) that cover [0, count), a few for each thread.
template <typename Fn>
void parallel_ranges(int64_t count, int64_t threads, const Fn& fn) {
    const int64_t pieces = threads <= 1 ? 1 : count < 4 * threads ? count : 4 * threads;
    parallel(pieces, threads, [&](int64_t i) { fn(count * i / pieces, count * (i + 1) / pieces); });
}

}  // namespace ssd
