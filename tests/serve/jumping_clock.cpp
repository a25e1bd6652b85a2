// LD_PRELOAD library: the wall clock, for every process that loads it, is off by the eight bytes of JUMPING_CLOCK (a
// file of seconds, mapped, so that a test can move the clock of processes that run). Other clocks stay as they are.
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

static std::int64_t offset_s() {
    static volatile std::int64_t* shared = [] {
        const char* name = std::getenv("JUMPING_CLOCK");
        int file = name ? open(name, O_RDONLY) : -1;
        void* page = file < 0 ? MAP_FAILED : mmap(nullptr, sizeof(std::int64_t), PROT_READ, MAP_SHARED, file, 0);
        return page == MAP_FAILED ? nullptr : static_cast<volatile std::int64_t*>(page);
    }();
    return shared ? *shared : 0;
}

template <typename F>
static F next(const char* name) {
    return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

extern "C" int clock_gettime(clockid_t clock, struct timespec* now) {
    static auto real = next<int (*)(clockid_t, struct timespec*)>("clock_gettime");
    int status = real(clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_s();
    return status;
}

extern "C" int gettimeofday(struct timeval* now, void* zone) {
    static auto real = next<int (*)(struct timeval*, void*)>("gettimeofday");
    int status = real(now, zone);
    if (status == 0 && now) now->tv_sec += offset_s();
    return status;
}

extern "C" time_t time(time_t* told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
