"""The machines of AI Platform Training: scale tiers, machine types and accelerators, and what Vertex AI has in their place.

Names are those of AI Platform (https://cloud.google.com/ai-platform/training/docs/machine-types) and of Vertex AI
(https://cloud.google.com/vertex-ai/docs/training/configure-compute), which has neither tiers nor the legacy names; the
counterparts are the Compute Engine types that AI Platform's documentation gives as the nearest. Which accelerators go with
which machine and in which region changes from month to month, so the services say that.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from trainer.errors import UsageError, did_you_mean


class Machine(NamedTuple):
    """A machine type and what is plugged into it."""

    type: str
    accelerator: str = ''
    """Accelerator type, '' for none."""
    accelerators: int = 0
    """How many each machine has."""


class Tier(NamedTuple):
    """The cluster that a scale tier stands for, in Compute Engine's machines."""

    master: Machine
    worker: Machine = Machine('')
    workers: int = 0
    parameter_server: Machine = Machine('')
    parameter_servers: int = 0


_K80, _P100, _V100, _T4 = 'NVIDIA_TESLA_K80', 'NVIDIA_TESLA_P100', 'NVIDIA_TESLA_V100', 'NVIDIA_TESLA_T4'
_TPUS = ('TPU_V2', 'TPU_V3')
ACCELERATORS = (
    _K80, _P100, _V100, _T4, 'NVIDIA_TESLA_P4', 'NVIDIA_TESLA_A100', *_TPUS,
    # Vertex AI's alone.
    'NVIDIA_A100_80GB', 'NVIDIA_L4', 'NVIDIA_H100_80GB', 'NVIDIA_H100_MEGA_80GB', 'NVIDIA_H200_141GB', 'NVIDIA_B200',
)  # fmt: skip
# What is out of service, and what takes its place.
REPLACED_ACCELERATORS = {_K80: _T4}
_MAX_REPLACED = 4  # of the T4 in one machine
# A whole TPU machine, which Vertex AI starts with the program on it.
TPU_MACHINE = Machine('cloud-tpu', 'TPU_V2', 8)

CUSTOM = 'CUSTOM'
TIERS = {
    'BASIC': Tier(Machine('n1-standard-4')),
    'STANDARD_1': Tier(Machine('n1-highcpu-8'), Machine('n1-highcpu-8'), 4, Machine('n1-standard-4'), 3),
    'PREMIUM_1': Tier(Machine('n1-highcpu-16'), Machine('n1-highcpu-16'), 19, Machine('n1-highmem-8'), 11),
    'BASIC_GPU': Tier(Machine('n1-standard-8', _K80, 1)),
    'BASIC_TPU': Tier(TPU_MACHINE),
}
SCALE_TIERS = (*TIERS, CUSTOM)

# AI Platform's own names.
LEGACY = {
    'standard': Machine('n1-standard-4'),
    'large_model': Machine('n1-highmem-8'),
    'complex_model_s': Machine('n1-highcpu-8'),
    'complex_model_m': Machine('n1-highcpu-16'),
    'complex_model_l': Machine('n1-highcpu-32'),
    'standard_gpu': Machine('n1-standard-8', _K80, 1),
    'complex_model_m_gpu': Machine('n1-standard-16', _K80, 4),
    'complex_model_l_gpu': Machine('n1-standard-32', _K80, 8),
    'standard_p100': Machine('n1-standard-8', _P100, 1),
    'complex_model_m_p100': Machine('n1-standard-16', _P100, 4),
    'standard_v100': Machine('n1-standard-8', _V100, 1),
    'large_model_v100': Machine('n1-highmem-8', _V100, 1),
    'complex_model_m_v100': Machine('n1-standard-16', _V100, 4),
    'complex_model_l_v100': Machine('n1-standard-32', _V100, 8),
}
CLOUD_TPU = 'cloud_tpu'
# The names that Compute Engine makes: a family, which may be newer than this file, and what the machine has more of.
_COMPUTE_ENGINE = re.compile(r'[a-z]+\d+[a-z]*-(standard|(high|mega|ultra)(mem|cpu|gpu))-\d+g?')
# To suggest the nearest to a misspelt one.
_COMMON = tuple(f'n1-{kind}-{cpus}' for kind in ('standard', 'highmem', 'highcpu') for cpus in (4, 8, 16, 32, 64, 96))


def check(machine: Machine, where: str, accelerator_where: str) -> None:
    """Raises a UsageError unless the machine type has a name that a service may know, and may have accelerators if it does.

    Args:
        machine: as a job file has it.
        where: the file and key of the type, for messages.
        accelerator_where: the same of the accelerator.
    """
    if machine.type in LEGACY:
        if machine.accelerator:
            raise UsageError(f'{accelerator_where}: {machine.type} takes none; expected a machine type such as n1-standard-8')
    elif machine.type == CLOUD_TPU:
        if machine.accelerator not in ('', *_TPUS):
            raise UsageError(f'{accelerator_where}: a {CLOUD_TPU} has {" or ".join(_TPUS)}, got {machine.accelerator}')
    elif not _COMPUTE_ENGINE.fullmatch(machine.type):
        hint = did_you_mean(machine.type, (*LEGACY, CLOUD_TPU, *_COMMON)) or '; expected one such as n1-standard-8'
        raise UsageError(f'{where}: unknown machine type {machine.type}{hint}')


def to_compute_engine(machine: Machine) -> Machine:
    """The machine in Vertex AI's terms: no legacy name, no accelerator that is out of service."""
    if machine.type in LEGACY:
        machine = LEGACY[machine.type]
    elif machine.type == CLOUD_TPU:
        machine = TPU_MACHINE._replace(accelerator=machine.accelerator or TPU_MACHINE.accelerator)
    replacement = REPLACED_ACCELERATORS.get(machine.accelerator)
    if replacement is None:
        return machine
    return machine._replace(accelerator=replacement, accelerators=min(machine.accelerators, _MAX_REPLACED))
