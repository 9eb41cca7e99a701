# A thousand front ends come and go on one process, by each way of reaching their pages; nothing is left of them.
ram_disks 2 8
front_end cycles::
