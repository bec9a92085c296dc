-- oldest reader: 7
-- Plans: their bodies by hash, the versions that are registered, and which run needs which body.

CREATE TABLE holdfast.plan_bodies (
    tenant text COLLATE "C" NOT NULL,
    sha256 bytea NOT NULL,
    body   bytea NOT NULL,                         -- as it was given; sealed, if payloads are
    put_at bigint NOT NULL,                        -- when it was given last
    PRIMARY KEY (tenant, sha256)
);

CREATE TABLE holdfast.plans (
    tenant        text COLLATE "C" NOT NULL,
    plan_id       text COLLATE "C" NOT NULL,
    plan_version  text COLLATE "C" NOT NULL,
    sha256        bytea NOT NULL,
    uri           text NOT NULL,
    registered_by text NOT NULL,
    registered_at bigint NOT NULL,
    PRIMARY KEY (tenant, plan_id, plan_version)
);
CREATE INDEX plans_by_body ON holdfast.plans (tenant, sha256);

CREATE TABLE holdfast.plan_uses (
    run_no bigint PRIMARY KEY,
    tenant text COLLATE "C" NOT NULL,
    sha256 bytea NOT NULL
);
CREATE INDEX plan_uses_by_body ON holdfast.plan_uses (tenant, sha256);
