//! Votes: a question that all ranks answer, with the same result for all of them.
//!
//! VOTE: all ranks get the same result, also if a loss interrupts the vote. It is one small
//! operation. Then some ranks may have its result and others a failure; [`Session::rejoin`] tells
//! these the result that the others have (see [`crate::formation`]).

use gradwire_proto::ReduceOp;

use crate::{
    error::{GradwireError, Result},
    options::AllreduceOptions,
    session::Session,
};

/// The name of the operation. A rank has at most one vote in flight.
const NAME: &str = "gradwire.vote";

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
    pub fn vote(&self, yes: bool) -> Result<bool> {
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
        let options = AllreduceOptions::named(NAME).op(ReduceOp::Min);
        let started = session
            .tensor(&[u8::from(yes)], &[1])
            .and_then(|own| session.allreduce_async(own, options).map_err(GradwireError::from));
        let result = match started {
            Ok(handle) => handle.wait().map(|all| all[0] == 1),
            Err(error) => {
                // After a loss, a rank that never took part asks for the result all the same.
                if !error.is_recoverable() {
                    self.past().withdraw(vote);
                }
                Err(error)
            }
        };
        if let Ok(yes) = result {
            self.past().hear(vote, yes);
        }
        result
    }
}
