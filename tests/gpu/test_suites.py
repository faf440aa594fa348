"""The laws of each kind of workload on a GPU, without gangs: each rank needs a GPU of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.workloads import (
    test_base,
    test_flax,
    test_huggingface,
    test_keras,
    test_lightning_laws,
    test_schedules,
    test_torch,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.device_count(), reason="PyTorch sees no GPU here"),
]


class OneGpu:
    test_a_gang_goes_through_the_same_samples: Any = None


class TestTorch(OneGpu, test_torch.TestTorchWorkload):
    pass


class TestPlateau(OneGpu, test_schedules.TestPlateau):
    pass


class TestBase(OneGpu, test_base.TestBaseOfAFunction):
    pass


class TestTransformer(OneGpu, test_huggingface.TestGpt2):
    pass


class TestLora(OneGpu, test_huggingface.TestLora):
    pass


class TestLightning(OneGpu, test_lightning_laws.TestEverything):
    pass


class TestFlax(OneGpu, test_flax.TestFlaxWorkload):
    pass


class TestKeras(OneGpu, test_keras.TestKerasWorkload):
    pass
