"""The emulated device: engines and train ranks that take the time a law says instead of computing. For tests and benchmarks.

`--slots emulated:8` runs the whole control plane (etcd, daemons, gRPC, HTTP, supervisors) at the scale of many nodes on one
machine: what is behind an emulated slot speaks the same protocols as what is behind a real one, and computes nothing.

- `law`: how long things take, with each replica's own hidden pace. Nothing that forecasts may import it (a contract);
- `responses`: what an emulated engine answers: lengths by a law, tokens by the request's seed; pure. `verdicts`: what a judge says;
- `device`: one engine in time: who waits, who runs, when each ends; pure. `slot`: those that share one; pure;
- `live_slot`, `engine`, `routes`: a slot and its engines in an event loop, and SGLang's routes for many of them in one process;
- `launch`, `inbox`, `host`: the process that has all emulated engines of a job on a node, and how it comes by them; `doors`, `models`,
  `registration`, `stand_ins`: their sockets, models and records, and a process for each that can be ended alone;
- `rank`: the train rank's process, the real one but for what it does in a step.

No figure that was taken on an emulated device says anything about a model, an accelerator or a network. No torch.
"""
