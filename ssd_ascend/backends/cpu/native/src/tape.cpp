// See tape.h.
#include "tape.h"

#include "common.h"

namespace ssd {
thread_local Tape* recording = nullptr;
}  // namespace ssd

using namespace ssd;

SSD_API Tape* ssd_tape_new() { return new Tape; }

SSD_API void ssd_tape_free(Tape* tape) { delete tape; }

// From here on this thread's kernel calls are written down on `tape` as well as done; null ends that.
SSD_API void ssd_tape_record(Tape* tape) { recording = tape; }

SSD_API int64_t ssd_tape_size(const Tape* tape) { return int64_t(tape->size()); }

// Calls from .. to - 1 of the tape once more, in order.
SSD_API void ssd_tape_play(const Tape* tape, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) (*tape)[i]();
}
