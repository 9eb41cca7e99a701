-- Version 8: cloud-init seeds of VMs. They hold secrets, so they are in no object and in no event.

CREATE TABLE seed (
    vm TEXT PRIMARY KEY REFERENCES vm (uuid),
    user_data TEXT NOT NULL,
    meta_data TEXT,
    network_config TEXT
) STRICT;
