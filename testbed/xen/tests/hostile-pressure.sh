# A front end of our own, in dom0, signals, writes and changes what is being read, without end: transport/tests/xen_hostile.
ram_disks 2 8
front_end pressure::
