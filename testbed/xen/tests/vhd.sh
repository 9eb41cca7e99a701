# A guest's verified load on a chain of two VHDs.
. /drop/storage.sh
verified_chain vhd
