# A front end of our own, in dom0, asks for what makes no sense, with grants that are none: transport/tests/xen_hostile.
ram_disks 2 8
front_end requests:: grants::
