use std::collections::VecDeque;

use gradwire_proto::{DType, ReduceOp, Shape};
use gradwire_worker::record::format::CallHead;

use super::*;

struct Calls(VecDeque<Next>);

impl Source for Calls {
    fn next(&mut self) -> Result<Next, RecordError> {
        Ok(self.0.pop_front().unwrap_or(Next::Cut))
    }
}

fn request(elements: u64) -> Request {
    Request::allreduce(DType::F32, Shape::new(&[elements]).unwrap(), ReduceOp::Sum)
}

/// A call of a thread.
fn call(number: u64, thread: u32, text: &str) -> Next {
    of(number, thread, text, Outcome::Done { aux: 0, moved: false, results: Vec::new() })
}

fn of(number: u64, thread: u32, text: &str, outcome: Outcome) -> Next {
    let (name, request) = (TensorName::new(text).unwrap(), request(4));
    let name_text = text.to_owned();
    let head =
        CallHead { number, thread, process_set: 0, name: name_text, request: Vec::new(), outcome };
    Next::Call(Box::new(Call::new(head, name, request)))
}

fn end(calls: u64, why: Why) -> Next {
    Next::End(End { calls, why })
}

struct Program {
    script: Script,
    calls: Calls,
}

impl Program {
    fn of(calls: impl IntoIterator<Item = Next>) -> Self {
        Self { script: Script::new(1 << 20), calls: Calls(calls.into_iter().collect()) }
    }

    fn ask(&mut self, number: u64, name: &str) -> Result<u64, String> {
        self.ask_for(number, name, &request(4))
    }

    /// The number of the recorded call, 0 if it does not end, or the text of the error.
    fn ask_for(&mut self, number: u64, name: &str, request: &Request) -> Result<u64, String> {
        let name = &TensorName::new(name).unwrap();
        let asked = Asked { number, process_set: 0, name, request };
        match self.script.ask(asked, &mut self.calls).unwrap() {
            Answer::Recorded(call) => Ok(call.head.number),
            Answer::Open => Ok(0),
            Answer::Over(failure) => Err(failure.to_string()),
            Answer::Differs(text) => Err(text),
        }
    }
}

#[test]
fn a_name_gets_its_results_in_their_order() {
    let mut program =
        Program::of([call(1, 0, "a"), call(2, 0, "b"), call(3, 0, "a"), end(3, Why::Left)]);
    assert_eq!([program.ask(1, "a"), program.ask(2, "b"), program.ask(3, "a")], [1, 2, 3].map(Ok));
    let over = program.ask(4, "a").unwrap_err();
    assert!(over.contains("left the job after 3 calls") && over.contains("'a'"), "{over}");
}

#[test]
fn threads_may_take_turns_in_another_way() {
    let calls = || [call(1, 0, "a"), call(2, 1, "x"), call(3, 0, "b"), call(4, 1, "y")];
    let mut program = Program::of(calls());
    let order = ["x", "y", "a", "b"];
    let found: Vec<_> = (1..).zip(order).map(|(at, name)| program.ask(at, name)).collect();
    assert_eq!(found, [2, 4, 1, 3].map(Ok));
    let mut program = Program::of(calls());
    let text = program.ask(1, "b").unwrap_err();
    assert!(text.contains("recorded: call 1") && text.contains("now: call 1"), "{text}");
}

#[test]
fn calls_may_end_in_another_order_than_made() {
    let mut program = Program::of([call(2, 0, "b"), call(1, 0, "a")]);
    assert_eq!([program.ask(1, "a"), program.ask(2, "b")], [1, 2].map(Ok));
}

#[test]
fn a_call_behind_a_gate_may_come_later() {
    let mut program = Program::of([call(1, 0, "a"), call(2, 0, "b"), call(3, 0, "c")]);
    assert_eq!([program.ask(2, "b"), program.ask(1, "a"), program.ask(3, "c")], [2, 1, 3].map(Ok));
}

#[test]
fn a_call_that_was_left_out_is_named() {
    let mut program =
        Program::of(["a", "b", "a", "b"].iter().zip(1..).map(|(n, at)| call(at, 0, n)));
    assert_eq!(program.ask(1, "a"), Ok(1));
    let text = program.ask(2, "a").unwrap_err();
    assert!(text.contains("recorded: call 2, allreduce (sum) of f32 [4] 'b'"), "{text}");
    assert!(text.contains("now: call 2, allreduce (sum) of f32 [4] 'a'"), "{text}");
}

#[test]
fn another_request_or_name_differs() {
    let mut program = Program::of([call(1, 0, "a")]);
    let text = program.ask_for(1, "a", &request(5)).unwrap_err();
    assert!(text.contains("of f32 [4] 'a'") && text.contains("of f32 [5] 'a'"), "{text}");
    let mut program = Program::of([call(1, 0, "a"), end(1, Why::Left)]);
    let text = program.ask(1, "z").unwrap_err();
    assert!(text.contains("[4] 'a'") && text.contains("[4] 'z'"), "{text}");
}

#[test]
fn the_end_of_a_record_says_why() {
    let failure = Failure::new(FailureKind::WorkerLost, "rank 1 was killed");
    let ends = [
        (end(1, Why::Failed(failure)), "rank 1 was killed"),
        (end(1, Why::Full), "limit of 1048576 bytes"),
        (end(1, Why::Unwritten("no space".into())), "no space"),
        (Next::Cut, "was killed, or the file is cut off"),
    ];
    for (end, expected) in ends {
        let mut program = Program::of([call(1, 0, "a"), end]);
        assert_eq!(program.ask(1, "a"), Ok(1));
        let text = program.ask(2, "b").unwrap_err();
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn an_unfinished_operation_gets_the_failure() {
    let failure = Failure::new(FailureKind::WorkerLost, "rank 1 was killed");
    let calls = [of(2, 0, "b", Outcome::Open), call(1, 1, "a"), end(2, Why::Failed(failure))];
    let mut program = Program::of(calls);
    assert_eq!(program.ask(1, "b"), Ok(0));
    assert!(program.script.is_over(&mut program.calls).unwrap().is_none(), "'a' is to come");
    assert_eq!(program.ask(2, "a"), Ok(1));
    let failure = program.script.is_over(&mut program.calls).unwrap().unwrap();
    assert!(failure.to_string().contains("rank 1 was killed"));
    assert_eq!(program.script.counts(&mut program.calls).unwrap(), (2, 2));
}

#[test]
fn calls_that_were_not_made_are_counted() {
    let mut program = Program::of((1..=9).map(|at| call(at, 0, &format!("n{at}"))));
    assert_eq!(program.ask(1, "n1"), Ok(1));
    assert_eq!(program.script.counts(&mut program.calls).unwrap(), (1, 9));
}
