"""Devices behind one seam: `base` states it, `registry` finds an implementation, each sub-package is one."""
