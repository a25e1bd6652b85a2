// A tape: kernel calls written down while a forward runs once, so that they can be run again without the interpreter.
//
// Every SSD_API kernel runs through `perform`, which also writes the call down when its thread is recording. A call holds
// its arguments by value; the addresses in them are for Python to keep alive (backends/cpu/graphs.py).
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace ssd {

using Tape = std::vector<std::function<void()>>;

extern thread_local Tape* recording;  // this thread's tape, or null

template <typename Fn>
void perform(Fn&& call) {
    call();
    if (recording) recording->emplace_back(std::forward<Fn>(call));
}

}  // namespace ssd
