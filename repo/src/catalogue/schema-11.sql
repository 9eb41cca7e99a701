-- Version 11: which repositories a job needs until it is over.

CREATE TABLE sr_use (
    sr TEXT NOT NULL,
    task TEXT NOT NULL,
    PRIMARY KEY (sr, task)
) STRICT;
CREATE INDEX sr_use_by_task ON sr_use (task);
