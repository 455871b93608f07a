"""Asking it again: clocks, the schedule, the driver and what comes back."""
