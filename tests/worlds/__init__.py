"""Worlds: sets of worker processes that run collective jobs for the tests.

A test uses the `world` fixture and passes it a function of its own module:

    def job(ctx, numel):            # runs on every rank
        x = torch.full((numel,), ctx.rank)
        dist.all_reduce(x)
        ctx.same(x, torch.full((numel,), sum(range(ctx.size))))

    def test_it(world):
        world.run(job, 17)

Modules: `pool` (parent side), `worker` (child side, `Ctx`), `arith` (inputs and reference
arithmetic), `gloo_gaps` and `nccl_gaps` (unsupported cases), `device` (worlds whose tensors are on
a device: the fixture `device_world`), `smoke` (a small job that calls every kind of operation, also
a program for launchers), `servers` (the server that ranks are forked from), `preload` (its
imports), `warm` (programs in processes that have already imported torch), `crew` (processes that
are started and killed one by one), `elastic_walk` (members of a mycoll.ElasticGroup), `ports`
(reserves a port), `during` (observes a world while a job runs in it), `hosts` (network namespaces),
`alone` (a world of `mycoll bench` with one rank), `nccl_packages` (finds NVIDIA's NCCL). Jobs that
several files of tests run are in `jobs`: no file of tests imports another.
"""
