//! What can be wrong with schedules.

use crate::schedule::Action;

/// What is wrong with schedules, and where. Steps and blocks are indices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// The list of schedules isn't one schedule per participant, in order.
    #[error(
        "schedule {at} of {schedules} says that it is participant {me}'s of {participants}: give \
         one for each participant, in order"
    )]
    Participants {
        /// Its place in the list.
        at: u32,
        /// How many schedules there are.
        schedules: u32,
        /// Whose it says it is.
        me: u32,
        /// How many participants it says there are.
        participants: u32,
    },
    /// There are other servers for participant 0, or nobody but servers.
    #[error(
        "participant {participant}: counts {servers} servers, which isn't what participant 0 \
         counts, or leaves nobody who contributes"
    )]
    Servers {
        /// Whose schedule.
        participant: u32,
        /// How many it counts.
        servers: u32,
    },
    /// Blocks don't tile the piece, or differ between participants.
    #[error(
        "participant {participant}: block {block} doesn't begin where the one before it ends, or \
         isn't participant 0's"
    )]
    Blocks {
        /// Whose blocks.
        participant: u32,
        /// The first that is wrong.
        block: u32,
    },
    /// A block isn't in one section of the piece.
    #[error("block {block} isn't in one section of the piece")]
    Section {
        /// The first one.
        block: u32,
    },
    /// A step names a block or a peer that isn't there, or itself as a peer.
    #[error(
        "participant {participant} step {step}: {action:?} names a block or a peer that it can't"
    )]
    Names {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// What it does.
        action: Action,
    },
    /// A step covers a block twice.
    #[error("participant {participant} step {step}: covers block {block} twice")]
    Repeated {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The block.
        block: u32,
    },
    /// A step comes after one that isn't earlier in the list.
    #[error(
        "participant {participant} step {step}: depends on step {after}, which isn't an earlier one"
    )]
    After {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The dependency.
        after: u32,
    },
    /// A message's number isn't the next one between the two.
    #[error(
        "participant {participant} step {step}, block {block}: message {found} with peer {peer} \
         should have number {expected}"
    )]
    Number {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// Its first block.
        block: u32,
        /// The other end.
        peer: u32,
        /// The number that it should have.
        expected: u32,
        /// The number that it has.
        found: u32,
    },
    /// One end of a message has no other end, or other blocks.
    #[error(
        "participant {participant} step {step}, block {block}: message {message} with peer {peer} \
         has no matching {missing} there"
    )]
    Unpaired {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// Its first block.
        block: u32,
        /// The other end.
        peer: u32,
        /// The number.
        message: u32,
        /// `send` or `receive`.
        missing: &'static str,
    },
    /// A step waits, over others, for itself.
    #[error(
        "participant {participant} step {step}, block {block}: waits for itself over dependencies \
         and messages"
    )]
    Cycle {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// Its first block.
        block: u32,
    },
    /// Two steps touch one block in no order, and one of them writes it.
    #[error(
        "participant {participant} steps {first} and {second}: both touch block {block} and \
         neither comes after the other"
    )]
    Race {
        /// Whose steps.
        participant: u32,
        /// One.
        first: u32,
        /// The other.
        second: u32,
        /// The block.
        block: u32,
    },
    /// A step uses a block that nothing has written.
    #[error("participant {participant} step {step}: uses block {block}, which holds nothing yet")]
    Nothing {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The block.
        block: u32,
    },
    /// A reduction would count a contribution twice (ONE).
    #[error(
        "participant {participant} step {step}: reduces participant {contributor}'s contribution \
         into block {block} a second time"
    )]
    Twice {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The block.
        block: u32,
        /// Whose contribution.
        contributor: u32,
    },
    /// What is published isn't the result (ONE).
    #[error(
        "participant {participant} step {step}: publishes block {block}, but participant \
         {contributor}'s contribution is {fault}"
    )]
    Result {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The block.
        block: u32,
        /// Whose contribution.
        contributor: u32,
        /// `missing` or `too much`.
        fault: &'static str,
    },
    /// Two participants publish sums that were added up in different orders (SAME).
    #[error(
        "participant {participant} step {step}: publishes block {block}, added up in another order \
         or rounded elsewhere than what participant {other} publishes"
    )]
    Association {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The block.
        block: u32,
        /// Who published it otherwise.
        other: u32,
    },
    /// A block is written after it was published.
    #[error("participant {participant} step {step}: writes block {block} after it was published")]
    Late {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The block.
        block: u32,
    },
    /// A participant reduces its local contributions, which aren't asked for.
    #[error(
        "participant {participant} step {step}: reduces local contributions to block {block}, but \
         has no part in the result"
    )]
    Uncalled {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The block.
        block: u32,
    },
    /// A block isn't published once by those who get it, or is published by others.
    #[error(
        "participant {participant}: publishes block {block} {times} times instead of {expected}"
    )]
    Published {
        /// Who.
        participant: u32,
        /// The block.
        block: u32,
        /// How often.
        times: u32,
        /// How often it should: 1 if it gets the result.
        expected: u32,
    },
}
