-- Version 2: tokens, for the API over TCP.

CREATE TABLE token (
    uuid TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    hash BLOB NOT NULL UNIQUE,         -- SHA-256 of the secret
    read_only INTEGER NOT NULL,
    created TEXT NOT NULL,
    expires TEXT
) STRICT;
