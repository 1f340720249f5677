#define _GNU_SOURCE
#include "lanes.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS 20000
#define CACHE_LINE 64

typedef struct {
    Lanes *lanes;
    int number;
    pthread_t thread;
} Lane;

struct Lanes {
    int count;
    Lane *lane;
    pthread_mutex_t lock; /* protects the fields below */
    Job *first, *last;    /* queue of jobs with untaken units */
    int untaken;          /* number of untaken units */
    int waiting;          /* lanes that wait for work, or that were woken and have not taken any */
    int closing;
    int wakeup_fd;        /* written to when a job ends or a lane becomes idle; -1: none */
    _Alignas(CACHE_LINE) atomic_uint begun; /* number of jobs started; lanes_close increments it, too */
    _Alignas(CACHE_LINE) atomic_uint ended; /* number of jobs done */
};

static void sleep_on(atomic_uint *word, unsigned value) {
    syscall(SYS_futex, (unsigned *)word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(atomic_uint *word, int count) {
    syscall(SYS_futex, (unsigned *)word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
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

/* Waits until `word` differs from `value`. */
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

/* Writes to the wake-up descriptor. The caller holds the lock. */
static void notify(const Lanes *lanes) {
    if (lanes->wakeup_fd < 0) return;
    ssize_t written = write(lanes->wakeup_fd, "", 1);
    (void)written; /* EAGAIN means that a wake-up is pending */
}

/* Takes the next unit. The caller holds the lock. */
static Job *take(Lanes *lanes, int *unit) {
    Job *job = lanes->first;
    *unit = job->taken++;
    lanes->untaken--;
    if (job->taken == job->units) lanes->first = job->next;
    return job;
}

static void *run_lane(void *argument) {
    const Lane *lane = argument;
    Lanes *lanes = lane->lanes;
    int has_ended_job = 0; /* this lane ended a job that is not yet reported to wakeup_fd */
    pthread_mutex_lock(&lanes->lock);
    for (;;) {
        if (lanes->first) {
            int unit;
            Job *job = take(lanes, &unit);
            if (has_ended_job) notify(lanes);
            has_ended_job = 0;
            pthread_mutex_unlock(&lanes->lock);
            job->run(job, unit, lane->number);
            pthread_mutex_lock(&lanes->lock);
            if (++job->ended == job->units) {
                atomic_store_explicit(&job->is_done, 1, memory_order_release); /* the job may be freed from here on */
                atomic_fetch_add_explicit(&lanes->ended, 1, memory_order_acq_rel);
                wake(&lanes->ended, INT_MAX);
                has_ended_job = 1;
            }
        } else if (lanes->closing) {
            break;
        } else {
            unsigned begun = atomic_load_explicit(&lanes->begun, memory_order_acquire);
            lanes->waiting++;
            if (has_ended_job || lanes->waiting == 1) notify(lanes); /* only the first idle lane writes */
            has_ended_job = 0;
            pthread_mutex_unlock(&lanes->lock);
            wait_while(&lanes->begun, begun);
            pthread_mutex_lock(&lanes->lock);
            lanes->waiting--;
        }
    }
    pthread_mutex_unlock(&lanes->lock);
    return NULL;
}

Lanes *lanes_open(int count) {
    Lanes *lanes = NULL;
    if (count < 1 || posix_memalign((void **)&lanes, CACHE_LINE, sizeof *lanes)) return NULL;
    *lanes = (Lanes){.wakeup_fd = -1};
    pthread_mutex_init(&lanes->lock, NULL);
    lanes->lane = calloc((size_t)count, sizeof(Lane));
    /* Threads of the interpreter handle signals. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (int i = 0; lanes->lane && i < count; i++) {
        Lane *lane = &lanes->lane[i];
        *lane = (Lane){.lanes = lanes, .number = i};
        if (pthread_create(&lane->thread, NULL, run_lane, lane)) break;
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
    pthread_mutex_lock(&lanes->lock);
    lanes->closing = 1;
    atomic_fetch_add_explicit(&lanes->begun, 1, memory_order_acq_rel);
    wake(&lanes->begun, INT_MAX);
    pthread_mutex_unlock(&lanes->lock);
    for (int i = 0; i < lanes->count; i++) pthread_join(lanes->lane[i].thread, NULL);
    pthread_mutex_destroy(&lanes->lock);
    free(lanes->lane);
    free(lanes);
}

int lanes_count(const Lanes *lanes) { return lanes->count; }

/* Idle lanes minus queued units. The caller holds the lock. */
static int num_free(const Lanes *lanes) {
    return lanes->waiting > lanes->untaken ? lanes->waiting - lanes->untaken : 0;
}

int lanes_free(Lanes *lanes) {
    pthread_mutex_lock(&lanes->lock);
    int free_now = num_free(lanes);
    pthread_mutex_unlock(&lanes->lock);
    return free_now;
}

void lanes_set_wakeup_fd(Lanes *lanes, int fd) {
    pthread_mutex_lock(&lanes->lock);
    lanes->wakeup_fd = fd;
    pthread_mutex_unlock(&lanes->lock);
}

void lanes_begin(Lanes *lanes, Job *job, int units, int max_lanes) {
    pthread_mutex_lock(&lanes->lock);
    int members = num_free(lanes) < max_lanes ? num_free(lanes) : max_lanes;
    job->members = members > 1 ? members : 1;
    job->units = members > 1 ? members : units;
    job->next = NULL;
    job->taken = job->ended = 0;
    atomic_init(&job->is_done, 0);
    atomic_init(&job->arrived, 0);
    atomic_init(&job->barriers, 0);
    if (lanes->first)
        lanes->last->next = job;
    else
        lanes->first = job;
    lanes->last = job;
    lanes->untaken += job->units;
    int wanted = job->units; /* the job may be freed once the lock is released */
    atomic_fetch_add_explicit(&lanes->begun, 1, memory_order_acq_rel);
    pthread_mutex_unlock(&lanes->lock);
    wake(&lanes->begun, wanted);
}

int lanes_is_done(const Job *job) { return atomic_load_explicit(&job->is_done, memory_order_acquire); }

void lanes_end(Lanes *lanes, Job *job) {
    while (!lanes_is_done(job)) {
        unsigned ended = atomic_load_explicit(&lanes->ended, memory_order_acquire);
        if (!lanes_is_done(job)) wait_while(&lanes->ended, ended);
    }
}

void lanes_barrier(Job *job) {
    if (job->members == 1) return;
    unsigned over = atomic_load_explicit(&job->barriers, memory_order_acquire);
    if (atomic_fetch_add_explicit(&job->arrived, 1, memory_order_acq_rel) + 1 == (unsigned)job->members) {
        atomic_store_explicit(&job->arrived, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&job->barriers, 1, memory_order_acq_rel);
        wake(&job->barriers, INT_MAX);
    } else {
        wait_while(&job->barriers, over);
    }
}
