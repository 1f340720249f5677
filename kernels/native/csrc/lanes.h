/* Lanes: threads that work side by side on one forward, one for each core, the caller being the first.
 *
 * A lane without work sleeps on a futex. Before that it looks for at most SPIN_NS whether work comes: waking up costs
 * more than the gap between two steps of a forward, and spinning longer takes the core from whoever has work.
 */
#ifndef PENSTOCK_LANES_H
#define PENSTOCK_LANES_H

typedef struct Lanes Lanes;

/* `count` lanes, of which count - 1 are new threads. NULL: the system gives no more threads. */
Lanes *lanes_open(int count);

/* Ends the threads. Nothing may run. */
void lanes_close(Lanes *lanes);

int lanes_count(const Lanes *lanes);

/* Calls work(argument, lane) once on each of the first `count` lanes, and returns when all calls have. One at a time. */
void lanes_run(Lanes *lanes, int count, void (*work)(void *argument, int lane), void *argument);

/* Waits until all lanes of the running call are here. */
void lanes_meet(Lanes *lanes);

#endif
