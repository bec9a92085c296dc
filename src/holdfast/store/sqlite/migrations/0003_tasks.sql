-- oldest reader: 1
-- Finding tasks by who they are for and when they are due.

CREATE INDEX tasks_by_assignee ON tasks (assignee, status, task_id) WHERE assignee IS NOT NULL;
-- An expression and not a column: older nodes that share the file write rows of seven columns.
CREATE INDEX tasks_by_due ON tasks (status, json_extract(task, '$.due_at'));

CREATE TABLE task_roles (
    role    NOT NULL,                              -- text; the number 0 for a task that names no role
    status  TEXT NOT NULL,
    task_id TEXT NOT NULL,
    PRIMARY KEY (role, status, task_id)
) WITHOUT ROWID;
CREATE INDEX task_roles_of_task ON task_roles (task_id);
INSERT INTO task_roles SELECT DISTINCT value, status, task_id FROM tasks, json_each(roles);
INSERT INTO task_roles SELECT 0, status, task_id FROM tasks WHERE roles = '[]';

-- Triggers, because older nodes do not know of this table.
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
