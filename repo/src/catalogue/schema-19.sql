-- Version 19: the VBDs that the daemon has made for clients of its NBD address, and removes with the last of them.

CREATE TABLE nbd_vbd (
    vbd TEXT PRIMARY KEY REFERENCES vbd (uuid) ON DELETE CASCADE
) STRICT;
