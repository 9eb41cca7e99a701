# A guest whose users have gone: nothing runs until the power button is pressed, but what a distribution leaves behind is there.

# udev's rules: drives whose medium can be changed are asked every two seconds.
echo 2000 >/sys/module/block/parameters/events_dfl_poll_msecs
button=
for event in /sys/class/input/event*; do
    read -r name <"$event/device/name"
    case $name in
    "Power Button") button=/dev/input/${event##*/} ;;
    # A desktop reads its pointer.
    *) cat "/dev/input/${event##*/}" >/dev/null & ;;
    esac
done
# A getty waits for somebody to log in.
cat /dev/ttyS0 >/dev/null 2>&1 &
dd if="$button" of=/dev/null bs=24 count=1
