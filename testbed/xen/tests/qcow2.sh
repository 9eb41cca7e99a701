# A guest's verified load on a qcow2 with a backing file, which is sound in the eyes of QEMU's own tool too: that looks at what is
# left in /out/images.
. /drop/storage.sh
verified_chain qcow2
mkdir /out/images
mv /images/disk.qcow2 /images/base.qcow2 /out/images/
