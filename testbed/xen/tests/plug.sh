# A second disk comes and goes three times while the guest works on the first.
ram_disks 2 16
guest a plug "rounds=3" /dev/ram0
wait_said a waiting=1 200
for round in 1 2 3; do
    wait_said a waiting=$round 200
    fill /dev/ram1 2
    content=$(hash_of /dev/ram1)
    plug a /dev/ram1 xvdb
    wait_said a plugged=$round 200
    expect "the plugged disk's content" "$(said a content)" "$content"
    unplug a xvdb
    wait_said a gone=$round 60
done
wait_end a 100
