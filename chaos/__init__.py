"""Faults on purpose: one per file, scenarios of them, and the verdict. Not part of the wheel.

python -m chaos.matrix      every place x standby depth x rank, each against an undisturbed run
python -m chaos.soak        two hundred recoveries in one job; memory, threads and descriptors stay flat
"""
