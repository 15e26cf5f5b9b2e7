from __future__ import annotations

import pytest

from trainer import machines
from trainer.errors import UsageError
from trainer.machines import Machine


@pytest.mark.parametrize(
    'machine',
    [
        Machine('n1-standard-4'),
        Machine('standard'),
        Machine('cloud_tpu', 'TPU_V2', 8),
        Machine('n1-highmem-16', 'NVIDIA_TESLA_V100', 8),
        Machine('a2-highgpu-4g', 'NVIDIA_TESLA_A100', 4),
        Machine('a3-megagpu-8g', 'NVIDIA_H100_MEGA_80GB', 8),
        Machine('g2-standard-24', 'NVIDIA_L4', 2),
        Machine('c4d-highcpu-32'),
    ],
)
def test_machines_that_there_are_pass(machine: Machine) -> None:
    machines.check(machine, 'type', 'accelerator')


@pytest.mark.parametrize(
    ('machine', 'message'),
    [
        (Machine('complex_model_xl'), 'type: unknown machine type complex_model_xl; did you mean complex_model_l?'),
        (Machine('huge'), 'type: unknown machine type huge; expected one such as n1-standard-8'),
        (Machine('standard', 'NVIDIA_TESLA_T4', 1),
         'accelerator: standard takes none; expected a machine type such as n1-standard-8'),
        (Machine('n1-standart-8'), 'type: unknown machine type n1-standart-8; did you mean n1-standard-8?'),
        (Machine('cloud_tpu', 'NVIDIA_L4', 1), 'accelerator: a cloud_tpu has TPU_V2 or TPU_V3, got NVIDIA_L4'),
    ],
)  # fmt: skip
def test_machines_that_there_are_not_are_refused(machine: Machine, message: str) -> None:
    with pytest.raises(UsageError) as error:
        machines.check(machine, 'type', 'accelerator')
    assert str(error.value) == message


@pytest.mark.parametrize(
    ('machine', 'counterpart'),
    [
        (Machine('n1-standard-4'), Machine('n1-standard-4')),
        (Machine('large_model'), Machine('n1-highmem-8')),
        (Machine('complex_model_m_gpu'), Machine('n1-standard-16', 'NVIDIA_TESLA_T4', 4)),
        (Machine('n1-standard-8', 'NVIDIA_TESLA_K80', 2), Machine('n1-standard-8', 'NVIDIA_TESLA_T4', 2)),
        (Machine('complex_model_l_gpu'), Machine('n1-standard-32', 'NVIDIA_TESLA_T4', 4)),
        (Machine('cloud_tpu'), Machine('cloud-tpu', 'TPU_V2', 8)),
        (Machine('cloud_tpu', 'TPU_V3', 8), Machine('cloud-tpu', 'TPU_V3', 8)),
    ],
)
def test_vertex_ai_has_a_counterpart_without_legacy_names(machine: Machine, counterpart: Machine) -> None:
    assert machines.to_compute_engine(machine) == counterpart


def test_every_legacy_name_and_tier_becomes_a_machine_that_vertex_ai_has() -> None:
    tiers = [machine for tier in machines.TIERS.values() for machine in (tier.master, tier.worker, tier.parameter_server)]
    for machine in [*machines.LEGACY.values(), *tiers]:
        if machine.type and machine != machines.TPU_MACHINE:
            machines.check(machines.to_compute_engine(machine), 'type', 'accelerator')
            machines.check(machine, 'type', 'accelerator')
