/* Lanes: threads that take units of work side by side, one for each core. Whoever gives them work goes on meanwhile.
 *
 * A job is cut into units, which lanes take one after another, those of an earlier job first: the lane that is done
 * with one job goes on with the next, and none waits for the others. Some jobs want lanes that go through them together
 * and meet on the way: such a job gets the lanes that are free when it comes.
 *
 * A lane without work sleeps on a futex. Before that it looks for at most SPIN_NS whether work comes: waking up costs
 * more than the gap between two steps of a forward, and spinning longer takes the core from whoever has work.
 */
#ifndef PENSTOCK_LANES_H
#define PENSTOCK_LANES_H

#include <stdatomic.h>

typedef struct Lanes Lanes;

/* What lanes work on. The caller fills in `run` and gives memory that lives until lanes_end has returned. */
typedef struct Job {
    void (*run)(struct Job *job, int unit, int lane);
    int units;   /* calls of `run`, each on some lane */
    int members; /* 1, or as many as `units`: the lanes that run it together */
    /* Of lanes.c alone. */
    struct Job *next;
    int taken, ended;
    atomic_int is_done;
    atomic_uint arrived, meetings;
} Job;

/* `count` lanes. NULL: the system gives no more threads. */
Lanes *lanes_open(int count);

/* Ends the threads. No job may be under way. */
void lanes_close(Lanes *lanes);

int lanes_count(const Lanes *lanes);

/* Lanes that have nothing to do. */
int lanes_free(Lanes *lanes);

/* From now on `bell` is written to where a job ends, and where a lane has nothing more to do; -1: no descriptor is. */
void lanes_ring(Lanes *lanes, int bell);

/* Begins a job of `units` units; or, where two lanes or more are free and as many may run it together, of one for each
 * of these, `most` at most. */
void lanes_begin(Lanes *lanes, Job *job, int units, int most);

/* Whether all units have been run. */
int lanes_is_done(const Job *job);

/* Waits for that. */
void lanes_end(Lanes *lanes, Job *job);

/* Waits until all lanes that run a job together are here. */
void lanes_meet(Job *job);

#endif
