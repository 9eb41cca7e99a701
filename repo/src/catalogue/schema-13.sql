-- Version 13: memory of suspended VMs.

CREATE TABLE vm_memory (
    vm TEXT PRIMARY KEY REFERENCES vm (uuid),
    memory TEXT NOT NULL                       -- JSON, VmMemory
) STRICT;
