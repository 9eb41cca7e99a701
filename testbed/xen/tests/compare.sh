# One guest with a disk of each of the $backends, over equal RAM disks: the load of compare, and its figures for the host.
set -- $backends
ram_disks $# 20
number=0
disks=
for each in "$@"; do
    # A page that was never written is not there, and is read for nothing.
    dd if=/dev/zero of=/dev/ram$number bs=1M count=20 2>/dev/null
    disks="$disks $each:/dev/ram$number"
    number=$((number + 1))
done
# Words of a list.
# shellcheck disable=SC2086
guest a compare "backends='$backends' rounds=$rounds requests=$requests" $disks
# For who counts instructions: where code lies.
cat /proc/[0-9]*/maps 2>/dev/null | grep /drop/tapline >/out/maps
cp /proc/kallsyms /proc/xen/xensyms /out/
# Looking costs instructions too.
nap=5
n=1
while [ $n -le "$rounds" ]; do
    wait_said a "round=$n" 1000
    echo "TAPLINE round=$n"
    n=$((n + 1))
done
wait_said a end=ok 60
tr '\r' '\n' <"$(console_of a)" | grep -a '^TAPLINE figure='
