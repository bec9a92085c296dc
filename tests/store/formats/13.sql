BEGIN TRANSACTION;
CREATE TABLE acceptance_records (
    run_no     INTEGER NOT NULL,
    name       TEXT NOT NULL,
    signal_id  TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    record     TEXT NOT NULL,                      -- JSON AcceptanceRecord
    PRIMARY KEY (run_no, name, signal_id)
) WITHOUT ROWID;
INSERT INTO "acceptance_records" VALUES(1,'early','click-1',1770206400000000,'{"workflow_id":"waiting","signal_name":"early","signal_id":"click-1","signal_storage_key":"workflow/waiting/signals/early/2026-01-28T12:00:00.000000Z_0efc2c27-052e-8aa7-8fa0-9e7fdc6294d1.json","payload_sha256":"3abf51432c3f669f8dbbc0037824e18b6e263fa34b8b05153cc0a137159c39e4","response":{"workflow_id":"waiting","signal_name":"early","signal_id":"click-1","accepted_at":1769601600000000,"signal_storage_key":"workflow/waiting/signals/early/2026-01-28T12:00:00.000000Z_0efc2c27-052e-8aa7-8fa0-9e7fdc6294d1.json","accepted":true,"warning":null},"accepted_at":1769601600000000,"expires_at":1770206400000000,"version":1}');
CREATE TABLE access_tokens (
    token_id     TEXT NOT NULL PRIMARY KEY,
    tenant       TEXT,                             -- NULL: for all tenants
    session_of   TEXT,                             -- NULL: no session
    expires_at   INTEGER,
    revoked_at   INTEGER,
    revoked_by   TEXT NOT NULL DEFAULT '',
    last_used_at INTEGER,
    token        TEXT NOT NULL                     -- JSON AccessToken, as it was made
) WITHOUT ROWID;
INSERT INTO "access_tokens" VALUES('aaaaaaaaaaaaaaaa',NULL,NULL,NULL,NULL,'',NULL,'{"token_id":"aaaaaaaaaaaaaaaa","digest":"df0790f236013511e91fa4532fb7761f62320a51a3868dabf4a13fe5f53e3263","name":"ann","role":"admin","created_at":1769601600000000}');
INSERT INTO "access_tokens" VALUES('bbbbbbbbbbbbbbbb',NULL,NULL,NULL,1769601600000000,'ann',NULL,'{"token_id":"bbbbbbbbbbbbbbbb","digest":"df0790f236013511e91fa4532fb7761f62320a51a3868dabf4a13fe5f53e3263","name":"ann","role":"admin","created_at":1769601600000000,"revoked_at":1769601600000000,"revoked_by":"ann"}');
CREATE TABLE activity_records (
    run_no          INTEGER NOT NULL,
    activity_name   TEXT NOT NULL,
    step_id         TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    is_completed    INTEGER NOT NULL,
    record          TEXT NOT NULL,                 -- JSON ActivityRecord
    PRIMARY KEY (run_no, activity_name, step_id, idempotency_key)
) WITHOUT ROWID;
INSERT INTO "activity_records" VALUES(3,'charge','charge','order-1',0,'{"run_id":"charging","activity_name":"charge","step_id":"charge","idempotency_key":"order-1","status":"indeterminate","created_at":1769601600000000,"updated_at":1769601600000000,"result":null,"error":null,"version":1}');
CREATE TABLE alerts (
    alert_no  INTEGER PRIMARY KEY AUTOINCREMENT,
    alert_id  TEXT NOT NULL UNIQUE,
    raised_at INTEGER NOT NULL,
    alert     TEXT NOT NULL                        -- JSON BusAlert
);
CREATE TABLE archived_runs (
    run_id       TEXT NOT NULL,
    tenant       TEXT NOT NULL,
    project      TEXT NOT NULL,
    environment  TEXT NOT NULL,
    plan_id      TEXT NOT NULL,
    plan_version TEXT NOT NULL,
    status       TEXT NOT NULL,
    version      INTEGER NOT NULL,
    created_at   INTEGER NOT NULL,                 -- an id may be used again: with this, it is one run
    finished_at  INTEGER NOT NULL,
    object_key   TEXT NOT NULL,                    -- where in the archive
    "offset"     INTEGER NOT NULL,                 -- of the run within the object, and how long it is
    size_bytes   INTEGER NOT NULL,
    archived_at  INTEGER NOT NULL,
    PRIMARY KEY (run_id, created_at)
) WITHOUT ROWID;
CREATE TABLE audit_log (
    at          INTEGER NOT NULL,
    entry_id    TEXT NOT NULL,
    tenant      TEXT,                                     -- NULL: about no tenant
    project     TEXT,
    environment TEXT,
    run_id      TEXT,
    actor       TEXT NOT NULL,
    token_id    TEXT,
    operation   TEXT NOT NULL,
    entry       TEXT NOT NULL,                            -- JSON AuditEntry, as it was given
    PRIMARY KEY (at, entry_id)
) WITHOUT ROWID;
INSERT INTO "audit_log" VALUES(1769601600005000,'entry-1',NULL,NULL,NULL,NULL,'ann',NULL,'tokens.create','{"entry_id":"entry-1","operation":"tokens.create","actor":"ann","at":1769601600005000}');
CREATE TABLE bulletins (
    kind        TEXT NOT NULL,
    bulletin_id TEXT NOT NULL,
    at          INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL,
    body        TEXT NOT NULL,                            -- JSON, of its kind
    PRIMARY KEY (kind, bulletin_id)
) WITHOUT ROWID;
INSERT INTO "bulletins" VALUES('sample','sample-1',1769601600005000,1769688000005000,'{"ready":1}');
CREATE TABLE bus_dead_letters (
    letter_id TEXT NOT NULL PRIMARY KEY,
    sink_no   INTEGER NOT NULL,
    run_no    INTEGER NOT NULL,                    -- 0: alerts
    run_id    TEXT NOT NULL,
    from_seq  INTEGER NOT NULL,
    to_seq    INTEGER NOT NULL,
    attempts  INTEGER NOT NULL,
    detail    TEXT NOT NULL,
    died_at   INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE dead_letters (
    letter_id  TEXT NOT NULL PRIMARY KEY,
    run_no     INTEGER NOT NULL,
    reason     TEXT NOT NULL,
    detail     TEXT NOT NULL,
    node       TEXT NOT NULL,
    died_at    INTEGER NOT NULL,
    settled    TEXT,                               -- NULL: it is open
    settled_by TEXT NOT NULL DEFAULT '',
    settled_at INTEGER,
    envelope   BLOB NOT NULL                       -- JSON Message, or the bytes that were found instead
) WITHOUT ROWID;
INSERT INTO "dead_letters" VALUES('13e54f40-2d0a-8cda-b712-ba0e03154f46',1,'retries exhausted','Conflict: not now','node-a',1769601600000000,NULL,'',NULL,X'7B227369676E616C5F6964223A22706F69736F6E222C2272756E5F6964223A2277616974696E67222C2274797065223A22496E7465726E616C436F6E74696E7565222C226F636375727265645F6174223A313736393630313630303030303030307D');
CREATE TABLE definitions (
    plan_id      TEXT NOT NULL,
    plan_version TEXT NOT NULL,
    definition   TEXT NOT NULL,                           -- JSON PublishedDefinition: what the version declares
    PRIMARY KEY (plan_id, plan_version)
) WITHOUT ROWID;
INSERT INTO "definitions" VALUES('order','1','{"plan_id":"order","plan_version":"1","signals":{"approval":{"type":"boolean"}},"allows_other_signals":false,"is_entity":false,"requires_approval":false,"limit":null}');
CREATE TABLE events (
    run_no              INTEGER NOT NULL,
    run_seq             INTEGER NOT NULL,
    event_id            TEXT NOT NULL,
    event_type          TEXT NOT NULL,
    step_id             TEXT,
    engine_attempt_id   INTEGER,
    logical_attempt_id  INTEGER,
    data                TEXT NOT NULL,             -- JSON
    idempotency_key     BLOB NOT NULL,             -- SHA256 (EVT-4)
    emitted_at          INTEGER NOT NULL,
    persisted_at        INTEGER NOT NULL,
    adapter_version     TEXT NOT NULL,
    engine_run_ref      TEXT NOT NULL,             -- JSON
    caused_by_signal_id TEXT,
    parent_event_id     TEXT,
    schema_version      INTEGER NOT NULL,
    PRIMARY KEY (run_no, run_seq),
    UNIQUE (run_no, idempotency_key)
);
INSERT INTO "events" VALUES(1,1,'90f1b23d-0015-88e9-89d9-20dd9f2a6295','RunQueued',NULL,NULL,NULL,'{"plan_id":"order","plan_version":"1","run_request_id":"request-1","input":null}',X'90F1B23D001568E909D920DD9F2A6295F53886FBCA8D844A739C6DC6BE9810B4',1769601600000000,1769601600000000,'holdfast/1','{"node":"starter"}',NULL,NULL,1);
INSERT INTO "events" VALUES(1,2,'4effb27e-8b16-8dab-bcee-7f11ad370b3a','RunStarted',NULL,NULL,NULL,'{}',X'4EFFB27E8B162DAB7CEE7F11AD370B3AEBACD3C72CE6555B202985E1E3ED1393',1769601600000000,1769601600000000,'holdfast/1','{"node":"node-a","epoch":1}',NULL,NULL,1);
INSERT INTO "events" VALUES(1,3,'8140461b-b3a2-8bfd-9c06-b6f0820046d9','SignalWaiting','approval',NULL,1,'{"name":"approval","token":"approval@3","until":1769774400000000}',X'8140461BB3A2DBFD5C06B6F0820046D9E787ED5C8039CFD09E515DBE02E6DE13',1769601600000000,1769601600000000,'holdfast/1','{"node":"node-a","epoch":1}',NULL,NULL,1);
INSERT INTO "events" VALUES(2,1,'c5e44d25-4f06-859e-b55e-cb75d6531e9c','RunQueued',NULL,NULL,NULL,'{"plan_id":"order","plan_version":"1","input":null,"reference_key":"o-7","tags":["eu"]}',X'C5E44D254F06659E355ECB75D6531E9C614C23B7C6BD9C85737106262FB447C2',1769601600000000,1769601600000000,'holdfast/1','{"node":"starter"}',NULL,NULL,1);
INSERT INTO "events" VALUES(2,2,'5e23cadd-5142-8d25-9689-acf771fc84a7','RunStarted',NULL,NULL,NULL,'{}',X'5E23CADD51420D251689ACF771FC84A7D7727921AECFBBA69FB06E00D2CA5A83',1769601600000000,1769601600000000,'holdfast/1','{"node":"node-a","epoch":1}',NULL,NULL,1);
INSERT INTO "events" VALUES(2,3,'c4ccd801-00ef-854c-b90f-88cb9027d41b','TaskCreated','approve',NULL,1,'{"task_id":"c4ccd801-00ef-854c-b90f-88cb9027d41b","name":"approve","token":"approve@3","roles":["manager"],"assignee":"ann"}',X'C4CCD80100EFA54CB90F88CB9027D41B09D8E58CEA78F7FB6645AFDBDD7300AD',1769601600000000,1769601600000000,'holdfast/1','{"node":"node-a","epoch":1}',NULL,NULL,1);
INSERT INTO "events" VALUES(3,1,'4a33bbd6-97df-84ef-8ed4-d63813379d4c','RunQueued',NULL,NULL,NULL,'{"plan_id":"order","plan_version":"1","input":null,"parent_run_id":"waiting"}',X'4A33BBD697DFD4EFCED4D63813379D4C36C183C1DC49EF6334E20E4E9F847DE5',1769601600000000,1769601600000000,'holdfast/1','{"node":"starter"}',NULL,NULL,1);
INSERT INTO "events" VALUES(3,2,'a75dba5f-22d5-803f-abed-114e40c75389','RunStarted',NULL,NULL,NULL,'{}',X'A75DBA5F22D5903FEBED114E40C75389CDB0EEDA401A4175DB8A641CDCA87D5C',1769601600000000,1769601600000000,'holdfast/1','{"node":"node-a","epoch":1}',NULL,NULL,1);
INSERT INTO "events" VALUES(3,3,'88df1d3e-009b-820b-8323-24c2b096e9e2','StepStarted','charge',1,1,'{"name":"charge","idempotency_key":"order-1"}',X'88DF1D3E009B220BC32324C2B096E9E24E15409AA123A98906A25060D2829541',1769601600000000,1769601600000000,'holdfast/1','{"node":"node-a","epoch":1}',NULL,NULL,1);
INSERT INTO "events" VALUES(4,1,'05b09b1a-510a-83ba-8dbe-c23392ca8f2b','RunQueued',NULL,NULL,NULL,'{"plan_id":"order","plan_version":"1","input":null}',X'05B09B1A510AE3BA4DBEC23392CA8F2B4CDFE630FC5AE8A0F3584139D559FB30',1769601600000000,1769601600000000,'holdfast/1','{"node":"starter"}',NULL,NULL,1);
INSERT INTO "events" VALUES(4,2,'3b146e0e-fa26-8bfd-a6a9-d2a7df607f1a','RunStarted',NULL,NULL,NULL,'{}',X'3B146E0EFA26EBFD26A9D2A7DF607F1A1811DC43105617362077EACA6E30E7F5',1769601600000000,1769601600000000,'holdfast/1','{"node":"node-a","epoch":1}',NULL,NULL,1);
INSERT INTO "events" VALUES(4,3,'868a065e-3ccb-89a9-a5d9-ad9bec6cb46d','TimerStarted','sleep',NULL,1,'{"token":"sleep@3","due_at":1769601601000000}',X'868A065E3CCB29A9E5D9AD9BEC6CB46D3E0116C79A0A7748384AD97C5FCDBAF2',1769601600000000,1769601600000000,'holdfast/1','{"node":"node-a","epoch":1}',NULL,NULL,1);
INSERT INTO "events" VALUES(5,1,'e389d44d-dceb-8295-b71e-a89d79b9bd2b','RunQueued',NULL,NULL,NULL,'{"plan_id":"order","plan_version":"1","input":null}',X'E389D44DDCEB3295371EA89D79B9BD2B7C1D48B3C70E575C4C4DC9925EB209D9',1769601600000000,1769601600000000,'holdfast/1','{"node":"starter"}',NULL,NULL,1);
INSERT INTO "events" VALUES(5,2,'c55b87bc-f120-8ddf-b64b-f4bb12cfb70e','RunStarted',NULL,NULL,NULL,'{}',X'C55B87BCF120DDDFB64BF4BB12CFB70EFB69E92F4587F13E03A66F8EACE9F81C',1769601600000000,1769601600000000,'holdfast/1','{"node":"node-a","epoch":1}',NULL,NULL,1);
INSERT INTO "events" VALUES(5,3,'aeb58ea8-b318-8923-8c9f-7ded5727b0aa','RunCompleted',NULL,NULL,NULL,'{"result":"shipped"}',X'AEB58EA8B3184923CC9F7DED5727B0AAB99F6BD954F6405D3FFC22897813DA8C',1769601600000000,1769601600000000,'holdfast/1','{"node":"node-a","epoch":1}',NULL,NULL,1);
INSERT INTO "events" VALUES(6,1,'65b04687-71a3-880a-99a3-945f42feb556','RunQueued',NULL,NULL,NULL,'{"plan_id":"order","plan_version":"1","input":{"cents":4200}}',X'65B0468771A3E80A99A3945F42FEB55642777F68221A5D1DA0E0F6DAC52B7147',1769601600005000,1769601600005000,'holdfast/1','{"node":"starter"}',NULL,NULL,1);
INSERT INTO "events" VALUES(7,1,'432cd2dc-4676-80f1-b75b-c93a57ad5d26','RunQueued',NULL,NULL,NULL,'{"plan_id":"limited","plan_version":"1","tenant":"acme","input":null}',X'432CD2DC4676E0F1775BC93A57AD5D26A8A8D84F809E3D79C9C87F21B4027BDB',1769601600005000,1769601600005000,'holdfast/1','{"node":"starter"}',NULL,NULL,1);
INSERT INTO "events" VALUES(8,1,'28324047-e288-8a2d-b1a3-4ed0bc652bd0','RunQueued',NULL,NULL,NULL,'{"plan_id":"limited","plan_version":"1","tenant":"acme","input":null}',X'28324047E2886A2D31A34ED0BC652BD02A9BADB16E94D01950C83CED0202698A',1769601600005000,1769601600005000,'holdfast/1','{"node":"starter"}',NULL,NULL,1);
CREATE TABLE gate_lines (
    plan_id TEXT NOT NULL,
    tenant  TEXT NOT NULL,
    key     TEXT NOT NULL,
    inside  INTEGER NOT NULL DEFAULT 0,
    per_key INTEGER NOT NULL,                      -- that of `gates`
    place   INTEGER,
    run_no  INTEGER,
    PRIMARY KEY (plan_id, tenant, key)
) WITHOUT ROWID;
INSERT INTO "gate_lines" VALUES('limited','acme','k',1,4611686018427387904,1769601540005000,8);
CREATE TABLE gate_runs (
    run_no    INTEGER PRIMARY KEY,
    plan_id   TEXT NOT NULL,
    tenant    TEXT NOT NULL,
    key       TEXT NOT NULL,
    place     INTEGER NOT NULL,                    -- its rank: the lowest is first in its line
    is_inside INTEGER NOT NULL DEFAULT 0,
    is_starting INTEGER NOT NULL DEFAULT 0         -- admitted under a rate, and has yet to start
);
INSERT INTO "gate_runs" VALUES(7,'limited','acme','k',1769601540005000,1,0);
INSERT INTO "gate_runs" VALUES(8,'limited','acme','k',1769601540005000,0,0);
CREATE TABLE gate_starts (
    plan_id   TEXT NOT NULL,
    number    INTEGER NOT NULL,
    starts_at INTEGER NOT NULL,
    PRIMARY KEY (plan_id, number)
) WITHOUT ROWID;
CREATE TABLE gates (
    plan_id     TEXT NOT NULL PRIMARY KEY,
    inside      INTEGER NOT NULL DEFAULT 0,
    per_key     INTEGER NOT NULL,                  -- as it was last used; 2^62: no limit
    last_tenant TEXT NOT NULL DEFAULT '',          -- of the run that was admitted last
    last_start  INTEGER NOT NULL DEFAULT 0,        -- number of the last row in gate_starts
    starting    INTEGER NOT NULL DEFAULT 0         -- how many were admitted under a rate and have yet to start
) WITHOUT ROWID;
INSERT INTO "gates" VALUES('limited',1,4611686018427387904,'acme',0,0);
CREATE TABLE holdfast_schema (version INTEGER PRIMARY KEY NOT NULL, oldest_reader INTEGER NOT NULL, applied_at INTEGER NOT NULL);
INSERT INTO "holdfast_schema" VALUES(8,8,1769601600000000);
INSERT INTO "holdfast_schema" VALUES(9,8,1769601600000000);
INSERT INTO "holdfast_schema" VALUES(10,8,1769601600000000);
INSERT INTO "holdfast_schema" VALUES(11,8,1769601600000000);
INSERT INTO "holdfast_schema" VALUES(12,8,1769601600000000);
INSERT INTO "holdfast_schema" VALUES(13,8,1769601600000000);
CREATE TABLE host_locks (
    name        TEXT PRIMARY KEY,
    owner       TEXT,                              -- NULL once it is released
    epoch       INTEGER NOT NULL,
    acquired_at INTEGER NOT NULL,
    lease_until INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "host_locks" VALUES('retention','node-a#1',1,1769601600005000,1769601660005000);
CREATE TABLE jobs (
    run_no       INTEGER NOT NULL,
    step_id      TEXT NOT NULL,
    queue        TEXT NOT NULL,                    -- '': carried out by the run's owner; there are only details
    activity     TEXT NOT NULL,
    visible_at   INTEGER,                          -- when it may be taken; NULL: never
    taken_by     TEXT,                             -- node of the last take
    next_attempt INTEGER NOT NULL,                 -- engine_attempt_id of the next take
    details      TEXT,                             -- JSON
    job          TEXT, limit_name TEXT GENERATED ALWAYS AS (
    CASE WHEN substr(queue, 1, 8) = 'limited:' AND json_valid(job) THEN json_extract(job, '$.options.limit.name') END
) VIRTUAL, limit_tenant TEXT GENERATED ALWAYS AS (
    CASE WHEN substr(queue, 1, 8) = 'limited:' AND json_valid(job) THEN json_extract(job, '$.tenant') END
) VIRTUAL, limit_key TEXT GENERATED ALWAYS AS (
    CASE WHEN substr(queue, 1, 8) = 'limited:' AND json_valid(job)
    THEN coalesce(json_extract(job, '$.options.limit.key'), '') END
) VIRTUAL,                             -- JSON Job
    PRIMARY KEY (run_no, step_id)
) WITHOUT ROWID;
INSERT INTO "jobs" VALUES(2,'print','mail','charge',1769601660000000,'node-b',2,'"page 7"','{"run_id":"asking","step_id":"print","queue":"mail","activity":"charge","input":["asking","print"],"options":null,"logical_attempt_id":1,"engine_attempt_id":1,"first_engine_attempt_id":1,"scheduled_at":1769601600000000,"due_at":null,"details":null,"queued_attempt_id":0,"idempotency_key":null,"effect":null,"tenant":"","environment":"","context":{"user":"ann"}}');
INSERT INTO "jobs" VALUES(2,'send','mail','charge',1769601600000000,NULL,1,NULL,'{"run_id":"asking","step_id":"send","queue":"mail","activity":"charge","input":["asking","send"],"options":null,"logical_attempt_id":1,"engine_attempt_id":1,"first_engine_attempt_id":1,"scheduled_at":1769601600000000,"due_at":null,"details":null,"queued_attempt_id":0,"idempotency_key":null,"effect":null,"tenant":"","environment":"","context":{"user":"ann"}}');
INSERT INTO "jobs" VALUES(3,'charge','','',NULL,NULL,0,'"asked the bank"',NULL);
CREATE TABLE limit_begins (
    name     TEXT NOT NULL,
    begun_at INTEGER NOT NULL,
    number   INTEGER NOT NULL,
    tenant   TEXT NOT NULL,
    key      TEXT NOT NULL,
    PRIMARY KEY (name, begun_at, number)
) WITHOUT ROWID;
CREATE TABLE limit_turns (
    name   TEXT NOT NULL,
    tenant TEXT NOT NULL,
    last   TEXT NOT NULL,
    PRIMARY KEY (name, tenant)
) WITHOUT ROWID;
CREATE TABLE messages (
    run_no    INTEGER NOT NULL,
    signal_id TEXT NOT NULL,
    due_at    INTEGER NOT NULL,
    message   TEXT NOT NULL,                       -- JSON Message
    PRIMARY KEY (run_no, signal_id)
) WITHOUT ROWID;
INSERT INTO "messages" VALUES(1,'TimerDue:approval@3',1769774400000000,'{"signal_id":"TimerDue:approval@3","run_id":"waiting","type":"TimerDue","occurred_at":1769601600000000,"due_at":1769774400000000,"expected_version":2,"waiting_token":"approval@3","step_id":"approval"}');
INSERT INTO "messages" VALUES(4,'TimerDue:sleep@3',1769601601000000,'{"signal_id":"TimerDue:sleep@3","run_id":"sleeping","type":"TimerDue","occurred_at":1769601600000000,"due_at":1769601601000000,"expected_version":2,"waiting_token":"sleep@3","step_id":"sleep"}');
INSERT INTO "messages" VALUES(6,'start',1769601600005000,'{"signal_id":"start","run_id":"queued","type":"InternalContinue","occurred_at":1769601600005000,"expected_version":1}');
INSERT INTO "messages" VALUES(7,'start',1769601600005000,'{"signal_id":"start","run_id":"inside","type":"InternalContinue","occurred_at":1769601600005000,"expected_version":1}');
INSERT INTO "messages" VALUES(8,'start',4611686018427387904,'{"signal_id":"start","run_id":"in line","type":"InternalContinue","occurred_at":1769601600005000,"expected_version":1}');
CREATE TABLE node_plans (
    node  TEXT NOT NULL PRIMARY KEY,
    plans TEXT NOT NULL                            -- JSON array; each is a plan's id, a line break, and its version
) WITHOUT ROWID;
INSERT INTO "node_plans" VALUES('node-a','["order\n1","order\n2"]');
CREATE TABLE nodes (
    node        TEXT NOT NULL PRIMARY KEY,
    lease_until INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "nodes" VALUES('node-a',1769601630005000);
CREATE TABLE outbox (
    sink_no  INTEGER NOT NULL,
    run_no   INTEGER NOT NULL,                     -- 0: alerts
    from_seq INTEGER NOT NULL,
    to_seq   INTEGER NOT NULL,
    at       INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    due_at   INTEGER NOT NULL,
    PRIMARY KEY (sink_no, run_no, from_seq)
) WITHOUT ROWID;
CREATE TABLE plan_bodies (
    tenant TEXT NOT NULL,
    sha256 BLOB NOT NULL,
    body   BLOB NOT NULL,                          -- as it was given; sealed, if payloads are
    put_at INTEGER NOT NULL,                       -- when it was given last
    PRIMARY KEY (tenant, sha256)
);
INSERT INTO "plan_bodies" VALUES('acme',X'303725AD1E11B275E0634296556496E3AC60F2FE716821B6A55F162E30E5DD39',X'7B22706C616E223A2265746C222C2276657273696F6E223A2231227D',1769601600005000);
CREATE TABLE plan_uses (
    run_no INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    sha256 BLOB NOT NULL
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
INSERT INTO "plans" VALUES('acme','etl','1',X'303725AD1E11B275E0634296556496E3AC60F2FE716821B6A55F162E30E5DD39','file:etl','',1769601600005000);
CREATE TABLE run_attributes (
    run_no INTEGER NOT NULL,
    name   TEXT NOT NULL,
    kind   TEXT NOT NULL,                          -- s text, n number, b truth value, t instant
    number REAL,
    word   TEXT
);
CREATE TABLE runs (
    run_no           INTEGER PRIMARY KEY,          -- in order of creation
    run_id           TEXT NOT NULL UNIQUE,
    tenant           TEXT NOT NULL,
    project          TEXT NOT NULL,
    environment      TEXT NOT NULL,
    plan_id          TEXT NOT NULL,
    plan_version     TEXT NOT NULL,
    run_request_id   TEXT NOT NULL,
    request_key      BLOB NOT NULL UNIQUE,         -- SHA256: a request creates one run (QUE-1)
    input_sha256     BLOB NOT NULL,
    parent_run_id    TEXT,
    reference_key    TEXT,
    tags             TEXT NOT NULL,                -- JSON array
    status           TEXT NOT NULL,
    version          INTEGER NOT NULL,             -- run_seq of the last event
    snapshot         TEXT,                         -- JSON RuntimeSnapshot: a cache of the fold
    created_at       INTEGER NOT NULL,
    updated_at       INTEGER NOT NULL,
    finished_at      INTEGER,
    inbox_seq        INTEGER NOT NULL DEFAULT 0,   -- number of the last signal accepted
    last_accepted_at INTEGER NOT NULL DEFAULT 0,
    ready_at         INTEGER,                      -- when a turn is due; NULL: nothing is in sight
    lease_owner      TEXT,
    lease_epoch      INTEGER NOT NULL DEFAULT 0,
    queued_at        INTEGER,                      -- since when it is queued for admission; NULL: it is not
    losses           INTEGER NOT NULL DEFAULT 0    -- nodes that were lost while they owned it, since its last turn
);
INSERT INTO "runs" VALUES(1,'waiting','default','default','default','order','1','request-1',X'191AA7FFA429EEF871CAE258E8197E7BD1C7E9030CB2C4509A274D63771F36CA',X'74234E98AFE7498FB5DAF1F36AC2D78ACC339464F950703B8C019892F982B90B',NULL,NULL,'[]','RUNNING',3,'{"status":"RUNNING","state_version":3,"waiting_kind":"signal","waiting_token":"approval@3","waiting_until":1769774400000000,"last_executed_by":"node-a","last_executed_on":1769601600000000,"waiting_name":"approval"}',1769601600000000,1769601600000000,NULL,1,1769601600000000,1769774400000000,'node-a',1,NULL,0);
INSERT INTO "runs" VALUES(2,'asking','default','default','default','order','1','asking',X'8ED2FDEA42916265D29C88EAD8D3FB144775ABB2C3FE41F1A9660C5997C7DE53',X'74234E98AFE7498FB5DAF1F36AC2D78ACC339464F950703B8C019892F982B90B',NULL,'o-7','["eu"]','RUNNING',3,'{"status":"RUNNING","state_version":3,"waiting_kind":"task","waiting_token":"approve@3","active_task_id":"c4ccd801-00ef-854c-b90f-88cb9027d41b","last_executed_by":"node-a","last_executed_on":1769601600000000,"waiting_name":"approve"}',1769601600000000,1769601600000000,NULL,0,0,NULL,'node-a',1,NULL,0);
INSERT INTO "runs" VALUES(3,'charging','default','default','default','order','1','charging',X'17FBE16436B5E63086EC396B5AD8A5059F760CACA03EDD295D5A92B0BC516413',X'74234E98AFE7498FB5DAF1F36AC2D78ACC339464F950703B8C019892F982B90B','waiting',NULL,'[]','RUNNING',3,'{"status":"RUNNING","state_version":3,"waiting_kind":"activity","last_executed_by":"node-a","last_executed_on":1769601600000000,"waiting_name":"charge"}',1769601600000000,1769601600000000,NULL,0,0,NULL,'node-a',1,NULL,0);
INSERT INTO "runs" VALUES(4,'sleeping','default','default','default','order','1','sleeping',X'FEA5ECDC9ACF588DD67EE73CBB71D41FBC8E33E506CE71B931640059070DE594',X'74234E98AFE7498FB5DAF1F36AC2D78ACC339464F950703B8C019892F982B90B',NULL,NULL,'[]','RUNNING',3,'{"status":"RUNNING","state_version":3,"waiting_kind":"timer","waiting_token":"sleep@3","waiting_until":1769601601000000,"last_executed_by":"node-a","last_executed_on":1769601600000000}',1769601600000000,1769601600000000,NULL,0,0,1769601601000000,'node-a',1,NULL,0);
INSERT INTO "runs" VALUES(5,'done','default','default','default','order','1','done',X'8CB96F93720F00798C863ADC3E2BCC256D1E67926A9B010BCF74F5EEC55E6FDE',X'74234E98AFE7498FB5DAF1F36AC2D78ACC339464F950703B8C019892F982B90B',NULL,NULL,'[]','COMPLETED',3,'{"status":"COMPLETED","state_version":3,"last_executed_by":"node-a","last_executed_on":1769601600000000}',1769601600000000,1769601600000000,1769601600000000,0,0,NULL,NULL,1,NULL,0);
INSERT INTO "runs" VALUES(6,'queued','default','default','default','order','1','queued',X'B1A1AAFCD8EAFB9B665D9B8FBA082BFAD5C69E195FD3670223C3DD3C3A32C01C',X'A5DA90A869A778A6E0BCD9578A8991243759C16B07445E132F14AB52EBA742A7',NULL,NULL,'[]','PENDING',1,'{"status":"PENDING","state_version":1,"last_executed_by":"starter","last_executed_on":1769601600005000}',1769601600005000,1769601600005000,NULL,0,0,1769601600005000,NULL,0,NULL,0);
INSERT INTO "runs" VALUES(7,'inside','acme','default','default','limited','1','inside',X'D3DF12E3CDBF548E2937F2F4DEF5D55CCE212D34DF99F5092FA883163E72F751',X'74234E98AFE7498FB5DAF1F36AC2D78ACC339464F950703B8C019892F982B90B',NULL,NULL,'[]','PENDING',1,'{"status":"PENDING","state_version":1,"last_executed_by":"starter","last_executed_on":1769601600005000}',1769601600005000,1769601600005000,NULL,0,0,1769601600005000,NULL,0,NULL,0);
INSERT INTO "runs" VALUES(8,'in line','acme','default','default','limited','1','in line',X'C80FF58B400963766263CEED03393631FAAA381B44B28874EC425EDD437973AB',X'74234E98AFE7498FB5DAF1F36AC2D78ACC339464F950703B8C019892F982B90B',NULL,NULL,'[]','PENDING',1,'{"status":"PENDING","state_version":1,"last_executed_by":"starter","last_executed_on":1769601600005000}',1769601600005000,1769601600005000,NULL,0,0,NULL,NULL,0,1769601600005000,0);
CREATE TABLE schedules (
    tenant      TEXT NOT NULL,
    project     TEXT NOT NULL,
    environment TEXT NOT NULL,
    schedule_id TEXT NOT NULL,
    app         TEXT NOT NULL,
    workflow    TEXT NOT NULL,
    next_due    INTEGER,                           -- NULL while it is paused, and after its end
    is_waiting  INTEGER NOT NULL,                  -- it has ticks that wait for the run before
    revision    INTEGER NOT NULL,
    body        TEXT NOT NULL,                     -- all of it, as JSON; the input is sealed, if payloads are
    PRIMARY KEY (tenant, project, environment, schedule_id)
) WITHOUT ROWID;
INSERT INTO "schedules" VALUES('default','default','default','nightly','shop','order',1769601600000007,1,1,'{"schedule_id":"nightly","app":"shop","workflow":"order","input":{"n":1},"spec":{"cron":"0 9 * * MON-FRI","tz":"Europe/Sofia","jitter_ms":5000,"overlap":"queue"},"created_at":1769601600005000,"updated_at":1769601600005000,"next_due":1769601600000007,"queued":[1769601600000000],"running":["waiting"]}');
CREATE TABLE signals (
    run_no       INTEGER NOT NULL,
    inbox_seq    INTEGER NOT NULL,
    name         TEXT NOT NULL,
    signal_id    TEXT NOT NULL,
    step_id      TEXT,
    accepted_at  INTEGER NOT NULL,                 -- strictly grows with inbox_seq
    received_at  INTEGER NOT NULL,                 -- what the clock said; the rate limit counts by it
    consumed_seq INTEGER,                          -- run_seq of the event that consumed it
    payload      TEXT NOT NULL,                    -- JSON
    by_caller    TEXT,                             -- JSON CallerRef: who sent it through a service
    PRIMARY KEY (run_no, inbox_seq)
) WITHOUT ROWID;
INSERT INTO "signals" VALUES(1,1,'early','click-1',NULL,1769601600000000,1769601600000000,NULL,'{"kept":true}',NULL);
CREATE TABLE sinks (
    sink_no      INTEGER PRIMARY KEY AUTOINCREMENT,
    name         TEXT NOT NULL UNIQUE,
    tenant       TEXT,                             -- NULL: of all tenants
    workflows    TEXT,                             -- JSON array; NULL: all
    alerts       INTEGER NOT NULL,                 -- whether it gets alerts
    sink         TEXT NOT NULL,                    -- JSON Sink
    failures     INTEGER NOT NULL DEFAULT 0,       -- in a row
    due_at       INTEGER NOT NULL DEFAULT 0,       -- until then it is left alone
    error        TEXT NOT NULL DEFAULT '',
    failed_at    INTEGER,
    delivered_at INTEGER,
    delivered    INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE store_keys (
    name TEXT PRIMARY KEY NOT NULL,                       -- what the key is for
    key BLOB NOT NULL                                     -- 32 bytes, secret
) WITHOUT ROWID;
INSERT INTO "store_keys" VALUES('completion',X'0123456789ABCDEF0123456789ABCDEF0123456789ABCDEF0123456789ABCDEF');
CREATE TABLE stream_segments (
    run_no         INTEGER NOT NULL,
    name           TEXT NOT NULL,
    first_seq      INTEGER NOT NULL,
    count          INTEGER NOT NULL,
    step_id        TEXT NOT NULL,                         -- empty: the workflow
    attempt        INTEGER NOT NULL,
    at             INTEGER NOT NULL,
    restarted_from INTEGER,
    body           TEXT NOT NULL,                         -- a JSON array of chunks, or that sealed
    PRIMARY KEY (run_no, name, first_seq)
);
CREATE TABLE stream_writers (                             -- the last attempt of each step that wrote
    run_no    INTEGER NOT NULL,
    name      TEXT NOT NULL,
    step_id   TEXT NOT NULL,
    attempt   INTEGER NOT NULL,
    epoch     INTEGER NOT NULL,
    first_seq INTEGER NOT NULL,
    count     INTEGER NOT NULL,
    PRIMARY KEY (run_no, name, step_id)
) WITHOUT ROWID;
CREATE TABLE streams (
    run_no    INTEGER NOT NULL,
    name      TEXT NOT NULL,
    last_seq  INTEGER NOT NULL,
    size      INTEGER NOT NULL,                           -- of the bodies, in bytes
    dropped   INTEGER NOT NULL,                           -- chunks that it had no room for
    is_closed INTEGER NOT NULL,
    PRIMARY KEY (run_no, name)
) WITHOUT ROWID;
CREATE TABLE task_roles (
    role    NOT NULL,                              -- text; the number 0 for a task that names no role
    status  TEXT NOT NULL,
    task_id TEXT NOT NULL,
    PRIMARY KEY (role, status, task_id)
) WITHOUT ROWID;
INSERT INTO "task_roles" VALUES('manager','OPEN','c4ccd801-00ef-854c-b90f-88cb9027d41b');
CREATE TABLE tasks (
    task_id  TEXT NOT NULL PRIMARY KEY,
    run_no   INTEGER NOT NULL,
    step_id  TEXT NOT NULL,
    status   TEXT NOT NULL,
    assignee TEXT,
    roles    TEXT NOT NULL,                        -- JSON array
    task     TEXT NOT NULL                         -- JSON Task
) WITHOUT ROWID;
INSERT INTO "tasks" VALUES('c4ccd801-00ef-854c-b90f-88cb9027d41b',2,'approve','OPEN','ann','["manager"]','{"task_id":"c4ccd801-00ef-854c-b90f-88cb9027d41b","run_id":"asking","step_id":"approve","name":"approve","status":"OPEN","created_at":1769601600000000,"task_type":"","route":"","payload":null,"form":null,"roles":["manager"],"assignee":"ann","due_at":null,"completed_at":null,"completed_by":null,"plan_id":"order","approvals":1,"of":null,"answered_by":[],"reminders":0,"is_escalated":false}');
CREATE TABLE tenant_attributes (
    tenant TEXT NOT NULL,
    name   TEXT NOT NULL,
    kind   TEXT NOT NULL,
    value  NOT NULL,                               -- REAL or TEXT
    run_no INTEGER NOT NULL,
    PRIMARY KEY (tenant, name, kind, value, run_no)
) WITHOUT ROWID;
CREATE TABLE waits (
    run_no  INTEGER NOT NULL,
    step_id TEXT NOT NULL,
    name    TEXT NOT NULL,
    token   TEXT NOT NULL,
    since   INTEGER NOT NULL,
    until   INTEGER,
    PRIMARY KEY (run_no, step_id)
) WITHOUT ROWID;
INSERT INTO "waits" VALUES(1,'approval','approval','approval@3',1769601600000000,1769774400000000);
CREATE INDEX runs_free ON runs (ready_at) WHERE lease_owner IS NULL AND ready_at IS NOT NULL;
CREATE INDEX runs_owned ON runs (lease_owner) WHERE lease_owner IS NOT NULL;
CREATE INDEX runs_owned_ready ON runs (lease_owner, ready_at) WHERE lease_owner IS NOT NULL AND ready_at IS NOT NULL;
CREATE INDEX runs_finished ON runs (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX runs_parent ON runs (parent_run_id) WHERE parent_run_id IS NOT NULL;
CREATE INDEX runs_reference ON runs (reference_key) WHERE reference_key IS NOT NULL;
CREATE INDEX messages_due ON messages (run_no, due_at);
CREATE INDEX signals_unconsumed ON signals (run_no, name) WHERE consumed_seq IS NULL;
CREATE INDEX signals_by_id ON signals (run_no, name, signal_id, accepted_at);
CREATE INDEX acceptance_records_expiry ON acceptance_records (expires_at);
CREATE INDEX waits_by_name ON waits (name, run_no);
CREATE UNIQUE INDEX tasks_open ON tasks (run_no, step_id) WHERE status = 'OPEN';
CREATE INDEX tasks_by_run ON tasks (run_no);
CREATE INDEX activity_records_open ON activity_records (run_no, activity_name, step_id) WHERE NOT is_completed;
CREATE INDEX nodes_lease ON nodes (lease_until);
CREATE TRIGGER node_plans_leave AFTER DELETE ON nodes
BEGIN
    DELETE FROM node_plans WHERE node = OLD.node;
END;
CREATE INDEX jobs_visible ON jobs (queue, visible_at, run_no, step_id, activity) WHERE visible_at IS NOT NULL;
CREATE TRIGGER jobs_purge AFTER DELETE ON runs
BEGIN
    DELETE FROM jobs WHERE run_no = OLD.run_no;
END;
CREATE INDEX tasks_by_assignee ON tasks (assignee, status, task_id) WHERE assignee IS NOT NULL;
CREATE INDEX tasks_by_due ON tasks (status, json_extract(task, '$.due_at'));
CREATE INDEX task_roles_of_task ON task_roles (task_id);
CREATE TRIGGER task_roles_insert AFTER INSERT ON tasks
BEGIN
    INSERT INTO task_roles SELECT DISTINCT value, NEW.status, NEW.task_id FROM json_each(NEW.roles);
    INSERT INTO task_roles SELECT 0, NEW.status, NEW.task_id WHERE NEW.roles = '[]';
END;
CREATE TRIGGER task_roles_update AFTER UPDATE ON tasks
BEGIN
    DELETE FROM task_roles WHERE task_id = OLD.task_id;
    INSERT INTO task_roles SELECT DISTINCT value, NEW.status, NEW.task_id FROM json_each(NEW.roles);
    INSERT INTO task_roles SELECT 0, NEW.status, NEW.task_id WHERE NEW.roles = '[]';
END;
CREATE TRIGGER task_roles_delete AFTER DELETE ON tasks
BEGIN
    DELETE FROM task_roles WHERE task_id = OLD.task_id;
END;
CREATE INDEX dead_letters_open ON dead_letters (died_at, letter_id) WHERE settled IS NULL;
CREATE INDEX dead_letters_by_run ON dead_letters (run_no, died_at, letter_id);
CREATE TRIGGER dead_letters_purge AFTER DELETE ON runs
BEGIN
    DELETE FROM dead_letters WHERE run_no = OLD.run_no;
END;
CREATE INDEX access_tokens_sessions ON access_tokens (expires_at) WHERE session_of IS NOT NULL;
CREATE INDEX gate_runs_waiting ON gate_runs (plan_id, tenant, key, place, run_no) WHERE NOT is_inside;
CREATE INDEX gate_runs_inside ON gate_runs (plan_id, run_no) WHERE is_inside;
CREATE INDEX gate_lines_open ON gate_lines (plan_id, tenant, place, run_no) WHERE place IS NOT NULL AND inside < per_key;
CREATE TRIGGER gate_runs_purge AFTER DELETE ON runs
BEGIN
    DELETE FROM gate_runs WHERE run_no = OLD.run_no;
END;
CREATE TRIGGER gate_runs_come AFTER INSERT ON gate_runs
BEGIN
    INSERT OR IGNORE INTO gate_lines (plan_id, tenant, key, per_key)
        SELECT NEW.plan_id, NEW.tenant, NEW.key, per_key FROM gates WHERE plan_id = NEW.plan_id;
    UPDATE gate_lines SET inside = inside + NEW.is_inside
        WHERE plan_id = NEW.plan_id AND tenant = NEW.tenant AND key = NEW.key;
END;
CREATE TRIGGER gate_runs_let_in AFTER UPDATE OF is_inside ON gate_runs
BEGIN
    UPDATE gates SET inside = inside + NEW.is_inside - OLD.is_inside WHERE plan_id = NEW.plan_id;
    UPDATE gate_lines SET inside = inside + NEW.is_inside - OLD.is_inside
        WHERE plan_id = NEW.plan_id AND tenant = NEW.tenant AND key = NEW.key;
END;
CREATE TRIGGER gate_runs_leave AFTER DELETE ON gate_runs
BEGIN
    UPDATE runs SET queued_at = NULL WHERE run_no = OLD.run_no;
    UPDATE gates SET inside = inside - OLD.is_inside WHERE plan_id = OLD.plan_id;
    UPDATE gate_lines SET inside = inside - OLD.is_inside
        WHERE plan_id = OLD.plan_id AND tenant = OLD.tenant AND key = OLD.key;
END;
CREATE TRIGGER gate_lines_first AFTER UPDATE OF inside ON gate_lines
BEGIN
    UPDATE gate_lines SET (place, run_no) = (
        SELECT place, run_no FROM gate_runs
        WHERE plan_id = NEW.plan_id AND tenant = NEW.tenant AND key = NEW.key AND NOT is_inside
        ORDER BY place, run_no LIMIT 1
    )
        WHERE plan_id = NEW.plan_id AND tenant = NEW.tenant AND key = NEW.key;
    DELETE FROM gate_lines
        WHERE plan_id = NEW.plan_id AND tenant = NEW.tenant AND key = NEW.key AND inside = 0 AND place IS NULL;
END;
CREATE TRIGGER gate_runs_start AFTER UPDATE OF is_starting ON gate_runs WHEN NEW.is_starting <> OLD.is_starting
BEGIN
    UPDATE gates SET starting = starting + NEW.is_starting - OLD.is_starting WHERE plan_id = NEW.plan_id;
END;
CREATE TRIGGER gate_runs_never_start AFTER DELETE ON gate_runs WHEN OLD.is_starting
BEGIN
    UPDATE gates SET starting = starting - 1 WHERE plan_id = OLD.plan_id;
END;
CREATE INDEX audit_log_by_tenant ON audit_log (tenant, at) WHERE tenant IS NOT NULL;
CREATE INDEX audit_log_by_run ON audit_log (run_id, at) WHERE run_id IS NOT NULL;
CREATE INDEX audit_log_by_actor ON audit_log (actor, at);
CREATE INDEX audit_log_by_token ON audit_log (token_id, at) WHERE token_id IS NOT NULL;
CREATE INDEX audit_log_by_operation ON audit_log (operation, at);
CREATE INDEX plans_by_body ON plans (tenant, sha256);
CREATE INDEX plan_uses_by_body ON plan_uses (tenant, sha256);
CREATE INDEX archived_runs_finished ON archived_runs (finished_at, run_id);
CREATE INDEX archived_runs_age ON archived_runs (archived_at, run_id);
CREATE INDEX dead_letters_settled ON dead_letters (settled_at, letter_id) WHERE settled IS NOT NULL;
CREATE INDEX bus_dead_letters_by_time ON bus_dead_letters (died_at, letter_id);
CREATE INDEX bus_dead_letters_by_run ON bus_dead_letters (run_no);
CREATE TRIGGER sinks_remove AFTER DELETE ON sinks
BEGIN
    DELETE FROM outbox WHERE sink_no = OLD.sink_no;
    DELETE FROM bus_dead_letters WHERE sink_no = OLD.sink_no;
END;
CREATE TRIGGER outbox_purge AFTER DELETE ON runs
BEGIN
    DELETE FROM outbox WHERE sink_no IN (SELECT sink_no FROM sinks) AND run_no = OLD.run_no;
    DELETE FROM bus_dead_letters WHERE run_no = OLD.run_no;
END;
CREATE INDEX run_attributes_run ON run_attributes (run_no, name);
CREATE INDEX run_attributes_number ON run_attributes (name, kind, number, run_no) WHERE number IS NOT NULL;
CREATE INDEX run_attributes_word ON run_attributes (name, kind, word, run_no) WHERE word IS NOT NULL;
CREATE INDEX schedules_due ON schedules (app, next_due) WHERE next_due IS NOT NULL;
CREATE INDEX runs_by_status ON runs (status, run_no, plan_id) WHERE status <> 'COMPLETED';
CREATE INDEX runs_by_workflow ON runs (plan_id, run_no);
CREATE INDEX runs_by_tenant ON runs (tenant, run_no) WHERE tenant <> 'default';
CREATE INDEX runs_by_tenant_status ON runs (tenant, status, run_no, plan_id)
    WHERE status <> 'COMPLETED' AND tenant <> 'default';
CREATE INDEX runs_by_tenant_finished ON runs (tenant, finished_at, run_no)
    WHERE finished_at IS NOT NULL AND tenant <> 'default';
CREATE TRIGGER run_attributes_come AFTER INSERT ON run_attributes
BEGIN
    INSERT OR IGNORE INTO tenant_attributes
        SELECT tenant, NEW.name, NEW.kind, coalesce(NEW.number, NEW.word), NEW.run_no FROM runs WHERE run_no = NEW.run_no;
END;
CREATE TRIGGER run_attributes_leave AFTER DELETE ON run_attributes
BEGIN
    DELETE FROM tenant_attributes
        WHERE tenant = (SELECT tenant FROM runs WHERE run_no = OLD.run_no) AND name = OLD.name AND kind = OLD.kind
            AND value = coalesce(OLD.number, OLD.word) AND run_no = OLD.run_no;
END;
CREATE INDEX bulletins_by_time ON bulletins (kind, at, bulletin_id);
CREATE INDEX bulletins_by_end ON bulletins (expires_at);
CREATE TRIGGER streams_purge AFTER DELETE ON runs
BEGIN
    DELETE FROM streams WHERE run_no = OLD.run_no;
    DELETE FROM stream_writers WHERE run_no = OLD.run_no;
    DELETE FROM stream_segments WHERE run_no = OLD.run_no;
END;
CREATE INDEX jobs_lines ON jobs
    (limit_name, limit_tenant, limit_key, visible_at, run_no, step_id, queue, activity, taken_by)
    WHERE limit_name IS NOT NULL AND visible_at IS NOT NULL;
CREATE INDEX jobs_places ON jobs (limit_name, visible_at)
    WHERE limit_name IS NOT NULL AND visible_at IS NOT NULL AND taken_by IS NOT NULL;
CREATE INDEX limit_begins_of_key ON limit_begins (name, tenant, key, begun_at);
DELETE FROM "sqlite_sequence";
COMMIT;
