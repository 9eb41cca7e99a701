# The tests of the crate `xen` that need Xen, as they are: the kernel's devices, and the store by both of its doors.
/drop/kernel --test-threads=1 || fail "the kernel's side"
XENSTORED_PATH=/run/xenstored/socket /drop/store || fail "the store's socket"
# One user has one transaction at a time through the kernel.
XENSTORED_PATH=/dev/xen/xenbus /drop/store --test-threads=1 || fail "the store's device"
