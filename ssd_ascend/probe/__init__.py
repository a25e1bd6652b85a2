"""What a device does when it is asked, not what its documents say: `python -m ssd_ascend.doctor --probe`."""
