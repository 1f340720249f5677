#define _GNU_SOURCE
#include "lanes.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS 20000
#define CACHE_LINE 64

typedef struct {
    _Alignas(CACHE_LINE) atomic_uint calls; /* so many calls of this lane have begun; it waits for the next */
    Lanes *lanes;
    int number;
    pthread_t thread;
} Lane;

struct Lanes {
    int count;
    Lane *lane;
    void (*work)(void *, int); /* NULL: the thread ends */
    void *argument;
    int members;                                     /* lanes of the running call */
    _Alignas(CACHE_LINE) atomic_int running;         /* those that have not returned from it */
    _Alignas(CACHE_LINE) atomic_uint ended;          /* calls that all lanes have returned from */
    _Alignas(CACHE_LINE) atomic_int arrived;         /* lanes that wait in lanes_meet */
    _Alignas(CACHE_LINE) atomic_uint meetings;       /* meetings that are over */
};

static void sleep_on(atomic_uint *word, unsigned value) {
    syscall(SYS_futex, (unsigned *)word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_all(atomic_uint *word) {
    syscall(SYS_futex, (unsigned *)word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Returns when `word` is no longer `value`. */
static void wait_while(atomic_uint *word, unsigned value) {
    int64_t begin = now_ns();
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value) return;
            relax();
        }
    } while (now_ns() - begin < SPIN_NS);
    while (atomic_load_explicit(word, memory_order_acquire) == value) sleep_on(word, value);
}

static void call(Lane *lane) {
    atomic_fetch_add_explicit(&lane->calls, 1, memory_order_acq_rel);
    wake_all(&lane->calls);
}

static void *live(void *argument) {
    Lane *lane = argument;
    Lanes *lanes = lane->lanes;
    for (unsigned seen = 0;; seen++) {
        wait_while(&lane->calls, seen);
        if (!lanes->work) return NULL;
        lanes->work(lanes->argument, lane->number);
        if (atomic_fetch_sub_explicit(&lanes->running, 1, memory_order_acq_rel) == 1) {
            atomic_fetch_add_explicit(&lanes->ended, 1, memory_order_acq_rel);
            wake_all(&lanes->ended);
        }
    }
}

Lanes *lanes_open(int count) {
    Lanes *lanes = NULL;
    if (count < 1 || posix_memalign((void **)&lanes, CACHE_LINE, sizeof *lanes)) return NULL;
    *lanes = (Lanes){.count = 1};
    if (posix_memalign((void **)&lanes->lane, CACHE_LINE, (size_t)count * sizeof(Lane))) {
        free(lanes);
        return NULL;
    }
    /* Signals are for the threads of the interpreter. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (int i = 1; i < count; i++) {
        Lane *lane = &lanes->lane[i];
        *lane = (Lane){.lanes = lanes, .number = i};
        if (pthread_create(&lane->thread, NULL, live, lane)) break;
        pthread_setname_np(lane->thread, "penstock-lane");
        lanes->count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (lanes->count < count) {
        lanes_close(lanes);
        return NULL;
    }
    return lanes;
}

void lanes_close(Lanes *lanes) {
    lanes->work = NULL;
    for (int i = 1; i < lanes->count; i++) {
        call(&lanes->lane[i]);
        pthread_join(lanes->lane[i].thread, NULL);
    }
    free(lanes->lane);
    free(lanes);
}

int lanes_count(const Lanes *lanes) { return lanes->count; }

void lanes_run(Lanes *lanes, int count, void (*work)(void *, int), void *argument) {
    lanes->members = count < lanes->count ? count : lanes->count;
    if (lanes->members == 1) {
        work(argument, 0);
        return;
    }
    lanes->work = work;
    lanes->argument = argument;
    atomic_store(&lanes->running, lanes->members);
    atomic_store(&lanes->arrived, 0);
    for (int i = 1; i < lanes->members; i++) call(&lanes->lane[i]);
    work(argument, 0);
    if (atomic_fetch_sub_explicit(&lanes->running, 1, memory_order_acq_rel) == 1) return;
    for (;;) {
        unsigned ended = atomic_load_explicit(&lanes->ended, memory_order_acquire);
        if (atomic_load_explicit(&lanes->running, memory_order_acquire) == 0) return;
        wait_while(&lanes->ended, ended);
    }
}

void lanes_meet(Lanes *lanes) {
    if (lanes->members == 1) return;
    unsigned over = atomic_load_explicit(&lanes->meetings, memory_order_acquire);
    if (atomic_fetch_add_explicit(&lanes->arrived, 1, memory_order_acq_rel) + 1 == lanes->members) {
        atomic_store_explicit(&lanes->arrived, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&lanes->meetings, 1, memory_order_acq_rel);
        wake_all(&lanes->meetings);
    } else {
        wait_while(&lanes->meetings, over);
    }
}
