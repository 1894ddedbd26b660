//! Votes: a question that all ranks answer, with the same result for all of them.
//!
//! VOTE: all ranks get the same result, also if a loss interrupts the vote. It is one small
//! operation. Then some ranks may have its result and others a failure; [`Session::rejoin`] tells
//! these the result that the others have (see [`crate::formation`]).

use gradwire_proto::{Collective, ReduceOp, VOTE};

use crate::{
    collectives::{Target, reductions::reduced},
    error::{GradwireError, Result},
    formation::VoteId,
    handle::Handle,
    memory::Payload,
    options::AllreduceOptions,
    session::Session,
};

impl Session {
    /// Votes: true only if every rank votes true. All ranks must call it, in the same order with
    /// respect to their other votes.
    ///
    /// In an elastic job all ranks get the same result, even if a rank is lost during the vote: if
    /// this call fails with a recoverable error, [`Session::rejoin`] returns the result.
    ///
    /// # Errors
    /// As for [`Session::allreduce`]; also if another vote of this rank has not ended, or has
    /// failed in this epoch.
    #[track_caller]
    pub fn vote(&self, yes: bool) -> Result<bool> {
        self.vote_async(yes)?.wait()
    }

    /// Starts [`Session::vote`] without waiting for it.
    #[track_caller]
    pub fn vote_async(&self, yes: bool) -> Result<Handle<bool>> {
        self.check_process()?;
        let session = self.pinned();
        let shared = session.shared();
        let vote = self.past().ask(session.epoch()).ok_or_else(|| {
            shared.check().err().unwrap_or_else(|| {
                let text = "another vote of this rank has not ended yet; a rank has one at a time";
                GradwireError::Invalid(text.to_owned())
            })
        });
        let vote = shared.noted(vote)?;
        session.start_vote(yes, vote).inspect_err(|error| {
            // After a loss, a rank whose vote did not start also asks for the result.
            if !error.is_recoverable() {
                self.past().withdraw(vote);
            }
        })
    }

    #[track_caller]
    fn start_vote(&self, yes: bool, vote: VoteId) -> Result<Handle<bool>> {
        let own = self.tensor(&[u8::from(yes)], &[1])?;
        // A rank has at most one vote in flight.
        let AllreduceOptions { common, reduction } =
            AllreduceOptions::named(VOTE).op(ReduceOp::Min);
        let request = reduced(Collective::Allreduce, &[own.memory()], reduction)?;
        let started = self.start(self.call(common, request)?, &[own.memory()], Target::InPlace)?;
        let session = self.clone();
        Ok(self.handle(started, move |_| {
            let yes = own[0] == 1;
            session.past().hear(vote, yes);
            Ok(yes)
        }))
    }
}
