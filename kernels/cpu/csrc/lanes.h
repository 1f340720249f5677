/* Lanes: worker threads, one per core. The caller does not wait while they work.
 *
 * A job has units. Lanes take units in order, those of earlier jobs first. A lane that has finished its unit takes the
 * next one without waiting for other lanes. A joint job runs on several lanes at once, which synchronise between steps:
 * it gets the lanes that are idle when it starts.
 *
 * An idle lane polls for at most SPIN_NS and then sleeps on a futex. Waking up costs more than the gap between two
 * steps of a forward; polling longer would take the core from other threads.
 */
#ifndef PENSTOCK_LANES_H
#define PENSTOCK_LANES_H

#include <stdatomic.h>

typedef struct Lanes Lanes;

/* Work for lanes. The caller sets `run` and keeps the memory until lanes_end has returned. */
typedef struct Job {
    void (*run)(struct Job *job, int unit, int lane);
    int units;   /* number of calls of `run`, each on one lane */
    int members; /* lanes of a joint job (equal to `units`); else 1 */
    /* Private to lanes.c. */
    struct Job *next;
    int taken, ended;
    atomic_int is_done;
    atomic_uint arrived, barriers;
} Job;

/* Starts `count` lanes. Returns NULL if threads cannot be started. */
Lanes *lanes_open(int count);

/* Ends the threads. No job may be running. */
void lanes_close(Lanes *lanes);

int lanes_count(const Lanes *lanes);

/* Number of idle lanes. */
int lanes_free(Lanes *lanes);

/* Sets the file descriptor to write to when a job ends or a lane becomes idle; -1: none. */
void lanes_set_wakeup_fd(Lanes *lanes, int fd);

/* Starts a job of `units` units. If at least two lanes are idle and `max_lanes` > 1, starts a joint job instead: on at
 * most `max_lanes` of the idle lanes, with one unit per lane. */
void lanes_begin(Lanes *lanes, Job *job, int units, int max_lanes);

/* Whether all units have been run. */
int lanes_is_done(const Job *job);

/* Waits until all units have been run. */
void lanes_end(Lanes *lanes, Job *job);

/* Barrier for the lanes of a joint job. */
void lanes_barrier(Job *job);

#endif
