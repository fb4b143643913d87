"""`backhaul simulate-fleet` predicts many sessions that share many workers.

NOTE [Fleet]
A fleet is too large for the simulation of single tensors in `backhaul.simulate.model`. Two models take its place. Tests
compare them with each other and, where both can run, with the simulation of single tensors.

1. `demand` says what one session's step asks of each resource, in seconds of a core and in bytes. Both models use it,
   so they differ only in how the sessions wait for each other.
2. `flow` divides what all sessions ask of a resource by what the resource can do. The largest quotient is the shortest
   possible step, and its resource is the one that binds. This is exact for many sessions that never all wait at once,
   and takes microseconds.
3. `events` simulates each session and each worker. The unit of work is what a session gives to a worker in one phase of
   a step, not a segment. A shared resource serves its sessions in equal parts, because a real worker takes the segments
   of its sessions in turns (`backhaul_server.worker.engine.fair_queue`), and TCP divides a link about equally.
"""
