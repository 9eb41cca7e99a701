# One guest with a disk of each of the $backends, over equal RAM disks: the load of compare, and its figures for the host.
set -- $backends
ram_disks $# 20
number=0
disks=
for each in "$@"; do
    # What a RAM disk never got is not there, and reading it costs nothing.
    fill /dev/ram$number 20
    disks="$disks $each:/dev/ram$number"
    number=$((number + 1))
done
# Words of a list.
# shellcheck disable=SC2086
guest a compare "backends='$backends' rounds=$rounds requests=$requests" $disks
tail -f "$(console_of a)" | grep -a --line-buffered '^TAPLINE figure=' &
wait_said a end=ok 3000
# What tail has not shown yet.
sleep 2
