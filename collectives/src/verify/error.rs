//! What can be wrong with schedules.

use crate::schedule::Action;

/// What is wrong with schedules, and where. Steps and blocks are indices.
#[expect(missing_docs, reason = "the texts explain the fields")]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// The list of schedules isn't one schedule per participant, in order.
    #[error(
        "schedule {at} of {schedules} is for participant {me} of {participants}: pass one for each \
         participant, in order"
    )]
    Participants { at: u32, schedules: u32, me: u32, participants: u32 },
    /// The number of servers differs from participant 0's, or all participants are servers.
    #[error(
        "participant {participant}: has {servers} servers, which differs from participant 0 or \
         leaves no contributor"
    )]
    Servers { participant: u32, servers: u32 },
    /// Blocks don't tile the piece, or differ between participants.
    #[error(
        "participant {participant}: block {block} doesn't begin where the one before it ends, or \
         isn't participant 0's"
    )]
    Blocks { participant: u32, block: u32 },
    /// A block isn't in one section of the piece.
    #[error("block {block} isn't in one section of the piece")]
    Section { block: u32 },
    /// A step names a block or a peer that doesn't exist, or itself as a peer.
    #[error("participant {participant} step {step}: {action:?} names an invalid block or peer")]
    Names { participant: u32, step: u32, action: Action },
    /// A step covers a block twice.
    #[error("participant {participant} step {step}: covers block {block} twice")]
    Repeated { participant: u32, step: u32, block: u32 },
    /// A step depends on a step that isn't earlier in the list.
    #[error("participant {participant} step {step}: depends on step {after}, which isn't earlier")]
    After { participant: u32, step: u32, after: u32 },
    /// A message's number isn't the next one between the two.
    #[error(
        "participant {participant} step {step}, block {block}: message {found} with peer {peer} \
         should have number {expected}"
    )]
    Number { participant: u32, step: u32, block: u32, peer: u32, expected: u32, found: u32 },
    /// One end of a message has no other end, or other blocks.
    #[error(
        "participant {participant} step {step}, block {block}: message {message} with peer {peer} \
         has no matching {missing} there"
    )]
    Unpaired {
        participant: u32,
        step: u32,
        block: u32,
        peer: u32,
        message: u32,
        missing: &'static str,
    },
    /// A step waits for itself, via other steps.
    #[error(
        "participant {participant} step {step}, block {block}: waits for itself via dependencies \
         and messages"
    )]
    Cycle { participant: u32, step: u32, block: u32 },
    /// Two steps touch one block without an order, and one of them writes it.
    #[error(
        "participant {participant} steps {first} and {second}: both touch block {block} and \
         neither comes after the other"
    )]
    Race { participant: u32, first: u32, second: u32, block: u32 },
    /// A step uses a block that nothing has written.
    #[error("participant {participant} step {step}: uses block {block}, which holds nothing yet")]
    Nothing { participant: u32, step: u32, block: u32 },
    /// A reduction would count a contribution twice (ONE).
    #[error(
        "participant {participant} step {step}: reduces participant {contributor}'s contribution \
         into block {block} a second time"
    )]
    Twice { participant: u32, step: u32, block: u32, contributor: u32 },
    /// What is published isn't the result (ONE).
    #[error(
        "participant {participant} step {step}: publishes block {block}, but participant \
         {contributor}'s contribution is {fault}"
    )]
    Result { participant: u32, step: u32, block: u32, contributor: u32, fault: &'static str },
    /// Two participants publish sums that were added up in different orders (SAME).
    #[error(
        "participant {participant} step {step}: publishes block {block}, added up in another order \
         or rounded at other places than by participant {other}"
    )]
    Association { participant: u32, step: u32, block: u32, other: u32 },
    /// A block is written after it was published.
    #[error("participant {participant} step {step}: writes block {block} after it was published")]
    Late { participant: u32, step: u32, block: u32 },
    /// A participant reduces local contributions that aren't wanted.
    #[error(
        "participant {participant} step {step}: reduces local contributions to block {block}, but \
         has no part in the result"
    )]
    Uncalled { participant: u32, step: u32, block: u32 },
    /// A block isn't published once by those that get it, or is published by others.
    #[error(
        "participant {participant}: publishes block {block} {times} times instead of {expected}"
    )]
    Published { participant: u32, block: u32, times: u32, expected: u32 },
}
