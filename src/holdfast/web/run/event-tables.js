// Written by `make tables` from the bodies of events in core/events.py; a test compares them. Do not edit.

// The kind of step that an event opens.
export const OPENING = {
  StepStarted: "activity",
  TimerStarted: "timer",
  SignalWaiting: "signal",
  TaskCreated: "task",
  ChildStarted: "child",
  UpdateAccepted: "update",
};

// How an event that closes a step leaves it.
export const CLOSING = {
  StepCompleted: "SUCCESS",
  StepFailed: "FAILED",
  StepSkipped: "SKIPPED",
  StepCancelled: "SKIPPED",
  TimerFired: "SUCCESS",
  SignalReceived: "SUCCESS",
  SignalTimedOut: "FAILED",
  TaskCompleted: "SUCCESS",
  ChildCompleted: "SUCCESS",
  ChildFailed: "FAILED",
  UpdateCompleted: "SUCCESS",
};

// From a status, by the type of an event, to the next one.
export const TRANSITIONS = {
  PENDING: { RunApproved: "APPROVED", RunStarted: "RUNNING", RunFailed: "FAILED", RunCancelled: "CANCELLED" },
  APPROVED: { RunStarted: "RUNNING", RunFailed: "FAILED", RunCancelled: "CANCELLED" },
  RUNNING: { RunPaused: "PAUSED", RunCompleted: "COMPLETED", RunFailed: "FAILED", RunCancelled: "CANCELLED" },
  PAUSED: { RunResumed: "RUNNING", RunFailed: "FAILED", RunCancelled: "CANCELLED" },
  COMPLETED: {},
  FAILED: {},
  CANCELLED: {},
};

export const TERMINAL = new Set(["COMPLETED", "FAILED", "CANCELLED"]);

// Kinds of steps that wait for an answer from outside: skipping one needs a permission of its own.
export const OVERRIDES = new Set(["signal", "task"]);

// Kinds of steps in which a run carries something out. In the others it only waits.
export const WORK = new Set(["activity", "update"]);

// What people call a step of a kind.
export const LABELS = {
  activity: "Activity",
  timer: "Timer",
  signal: "Wait",
  task: "Task",
  child: "Child run",
  update: "Update",
};

// How people see an event that is not plain.
export const TONES = {
  StepFailed: "bad",
  SignalTimedOut: "bad",
  ChildFailed: "bad",
  RunPaused: "warn",
  RunTimedOut: "bad",
  RunCompleted: "good",
  RunFailed: "bad",
  RunCancelled: "warn",
  SignalRejected: "bad",
  StepRetried: "warn",
  StepUnresolved: "bad",
  StepSucceededLate: "warn",
  SignalDeadLettered: "bad",
};
