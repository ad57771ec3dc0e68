"""Seeded draws without torch: those of its generator, so that the evidence of a proof is the same with and without."""

import numpy as np
import torch
from halfeven.exporters.inputs.draws import raw_draws


def test_the_draws_are_those_of_torch_s_generator_one_array_after_the_other() -> None:
    seed = int(np.random.default_rng().integers(1, 1 << 32))
    first, none, second = raw_draws(seed, 1000, 0, 7)
    seeded = torch.Generator().manual_seed(seed)
    np.testing.assert_array_equal(first % 17, torch.randint(17, (1000,), generator=seeded))
    assert none.size == 0
    torch.testing.assert_close(
        torch.from_numpy((second & 0xFFFFFF) * 2.0**-24).float(),
        torch.rand(7, generator=seeded),
        rtol=0,
        atol=0,
    )
