//! The completions of a shell offer what `--help` shows: clap_complete alone adds hidden commands.

use clap::Command;
use clap_complete::Shell;

/// The script that completes `gradwire` in `shell`.
pub fn script(shell: Shell, command: &Command) -> String {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut shown(command), "gradwire", &mut text);
    String::from_utf8_lossy(&text).into_owned()
}

/// A command without hidden parts. Clap can't remove a subcommand, so the command is made again of
/// what completions use.
fn shown(command: &Command) -> Command {
    let mut copy = Command::new(command.get_name().to_owned())
        .disable_version_flag(command.get_version().is_none())
        .args(command.get_arguments().filter(|argument| !argument.is_hide_set()).cloned())
        .subcommands(command.get_subcommands().filter(|one| !one.is_hide_set()).map(shown))
        .visible_aliases(command.get_visible_aliases().map(str::to_owned).collect::<Vec<_>>());
    if let Some(version) = command.get_version() {
        copy = copy.version(version.to_owned());
    }
    match command.get_about() {
        Some(about) => copy.about(about.clone()),
        None => copy,
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, ValueEnum};

    use super::*;
    use crate::args::Cli;

    #[test]
    fn completions_offer_what_help_shows() {
        for &shell in Shell::value_variants() {
            let text = script(shell, &Cli::command());
            for shown in ["run", "drain", "hosts", "allreduce", "iters"] {
                assert!(text.contains(shown), "{shell} lacks {shown}");
            }
            for hidden in ["exec-child", "join-service", "doctor-agent"] {
                let found = text.split(|c: char| !c.is_alphanumeric() && c != '-');
                assert!(!found.into_iter().any(|word| word == hidden), "{shell} has {hidden}");
            }
        }
    }
}
