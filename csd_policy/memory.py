"""Peak memory: what the cards held, or without one what the process held."""

import resource
import sys

import torch


def restart_peak(device: torch.device) -> None:
    """Measure the peak on cards from here on; that of a process is from its start."""
    if device.type == "cuda":
        for card in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(card)


def peak_memory(device: torch.device) -> int:
    """Bytes of the peak: allocated on all cards, or resident in the process if on the CPU."""
    if device.type == "cuda":
        return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # there in bytes, else in KiB


def gigabytes(count: int) -> str:
    """``count`` bytes for readers, in GB."""
    return f"{count / 1e9:.2f}"
