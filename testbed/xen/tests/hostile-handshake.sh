# A front end of our own, in dom0, writes into its node what no driver would, in any order: transport/tests/xen_hostile.
ram_disks 2 8
front_end handshake::
