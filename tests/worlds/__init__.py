"""Worlds: sets of worker processes that run collective jobs for the tests.

A test asks for the `world` fixture and hands it a function of its own module:

    def job(ctx, numel):            # runs on every rank at once
        x = torch.full((numel,), ctx.rank)
        dist.all_reduce(x)
        ctx.same(x, torch.full((numel,), sum(range(ctx.size))))

    def test_it(world):
        world.run(job, 17)

Modules: `pool` (parent side), `worker` (child side, `Ctx`), `arith` (inputs and reference
arithmetic), `gloo_gaps` and `nccl_gaps` (what those cannot do), `device` (worlds whose tensors are
on a device: the fixture `device_world`), `smoke` (a small job over every kind of operation, also a
program for the launchers), `servers` (what ranks are forked from), `preload` (what they find
imported), `warm` (programs in processes that have imported torch already), `crew` (processes that
are started and killed one by one), `elastic_walk` (members of a mycoll.ElasticGroup), `ports` (a
port to listen at that nobody takes meanwhile), `during` (asks about a world while a job runs in
it), `hosts` (network namespaces), `alone` (a world of `mycoll bench` with one rank),
`nccl_packages` (where NVIDIA's NCCL lies). Jobs that several files of tests run are in `jobs`: no
file of tests imports another.
"""
