-- Version 6: names are unique among the VDIs of a repository, among repositories and among VMs.

-- The names of what tasks are creating. Of a VDI with its repository, otherwise without one.
CREATE TABLE name_claim (
    task TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    sr TEXT,
    name TEXT NOT NULL
) STRICT;
-- Not a unique index: what is found in a repository keeps its name, and earlier versions did not compare names.
CREATE INDEX vdi_by_name ON vdi (name);
