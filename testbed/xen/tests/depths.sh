# Verified writes at depths of 1 to 128 and in requests of 4 KiB to 1 MiB, on the disk itself.
ram_disks 1 16
guest a depths "" /dev/ram0
wait_end a 500
