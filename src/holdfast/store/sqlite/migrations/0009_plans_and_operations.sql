-- oldest reader: 8
-- Plans: their bodies by hash, the versions that are registered, and which run needs which body.

CREATE TABLE plan_bodies (
    tenant TEXT NOT NULL,
    sha256 BLOB NOT NULL,
    body   BLOB NOT NULL,                          -- as it was given; sealed, if payloads are
    put_at INTEGER NOT NULL,                       -- when it was given last
    PRIMARY KEY (tenant, sha256)
);

CREATE TABLE plans (
    tenant        TEXT NOT NULL,
    plan_id       TEXT NOT NULL,
    plan_version  TEXT NOT NULL,
    sha256        BLOB NOT NULL,
    uri           TEXT NOT NULL,
    registered_by TEXT NOT NULL,
    registered_at INTEGER NOT NULL,
    PRIMARY KEY (tenant, plan_id, plan_version)
) WITHOUT ROWID;
CREATE INDEX plans_by_body ON plans (tenant, sha256);

CREATE TABLE plan_uses (
    run_no INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    sha256 BLOB NOT NULL
);
CREATE INDEX plan_uses_by_body ON plan_uses (tenant, sha256);
