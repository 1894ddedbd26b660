//! Options that users know from horovodrun, torchrun and mpirun. Each does here what it means
//! there, or is refused with its equivalent or the reason why it has none. Pure.
//!
//! Words of mpirun begin with one dash (`-np`, `-hostfile`), which clap would read as several short
//! options: `-hostfile` would print the help.

mod options;

use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
};

use clap::{
    Arg, Command, Parser,
    error::{ContextKind, ErrorKind},
};
use gradwire_launcher::error::CommandError;
use gradwire_settings::{KEYS, horovod};

use self::options::{
    LAUNCHERS,
    Meaning::{Always, AlwaysWith, Exports, Flag, Is, Refused, Switch, Variable},
    Row,
};

/// The option of `gradwire run` that sets a variable.
const VARIABLE: &str = "--variable";

/// The launcher that has this option, and its row.
fn find(name: &str) -> Option<(&'static str, &'static Row)> {
    // torchrun accepts both.
    let name = name.replace('_', "-");
    let rows = LAUNCHERS.iter().flat_map(|(launcher, rows)| rows.iter().map(|r| (*launcher, r)));
    let mut rows = rows.filter(|(_, (names, ..))| names.contains(&name.as_str()));
    rows.next()
}

/// The options that a command has itself.
struct Own<'a> {
    options: Vec<&'a Arg>,
    /// Another program reads its words.
    opaque: bool,
}

impl<'a> Own<'a> {
    /// The options of the command that `words` name, and how many words that takes.
    fn of(cli: &'a Command, words: &[OsString]) -> (Self, usize) {
        let (mut command, mut used) = (cli, 0);
        while let Some(next) = words.get(used).and_then(|word| command.find_subcommand(word)) {
            (command, used) = (next, used + 1);
        }
        let all = || command.get_arguments();
        let options = all().filter(|arg| !arg.is_positional()).collect();
        (Self { options, opaque: all().any(|arg| arg.get_id() == "words") }, used)
    }

    fn long(&self, name: &str) -> Option<&'a Arg> {
        let is = |arg: &&&Arg| {
            let aliases = arg.get_all_aliases().unwrap_or_default();
            arg.get_long() == Some(name) || aliases.contains(&name)
        };
        self.options.iter().find(is).copied()
    }

    fn has(&self, option: &str) -> bool {
        self.opaque || self.long(option.trim_start_matches('-')).is_some()
    }

    fn short(&self, letter: char) -> Option<&'a Arg> {
        self.options.iter().find(|arg| arg.get_short() == Some(letter)).copied()
    }

    /// How many words the option takes after this one, if clap can read it.
    fn values(&self, word: &str) -> Option<usize> {
        let takes = |arg: &Arg| arg.get_action().takes_values();
        if let Some(long) = word.strip_prefix("--") {
            let (name, value) = long.split_once('=').map_or((long, false), |(n, _)| (n, true));
            return match self.long(name) {
                Some(arg) => Some(if takes(arg) && !value { words_of(arg) } else { 0 }),
                None => (name == "help").then_some(0),
            };
        }
        let mut letters = word.strip_prefix('-')?.chars();
        while let Some(letter) = letters.next() {
            match self.short(letter) {
                // The rest is its value.
                Some(arg) if takes(arg) => return Some(usize::from(letters.as_str().is_empty())),
                Some(_) => {}
                None if letter == 'h' => {}
                None => return None,
            }
        }
        Some(0)
    }
}

/// How many words the value of an option has.
fn words_of(arg: &Arg) -> usize {
    arg.get_num_args().map_or(1, |words| words.max_values())
}

/// Replaces options of other launchers by those of `cli`, up to the program that `gradwire run`
/// runs; the program's own options are left alone.
///
/// # Errors
/// [`CommandError`] for an option that can't be accepted, with its equivalent or the reason.
pub fn translate(cli: &Command, words: Vec<OsString>) -> Result<Vec<OsString>, CommandError> {
    let is_translated = words.get(1).is_some_and(|word| {
        ["run", "bench", "doctor", "probe"].iter().any(|command| word == command)
    });
    if !is_translated {
        return Ok(words);
    }
    let (own, used) = Own::of(cli, &words[1..]);
    let runs = words[1] == "run";
    let mut words = words.into_iter();
    let mut done: Vec<OsString> = words.by_ref().take(1 + used).collect();
    while let Some(word) = words.next() {
        let text = word.to_str().filter(|text| text.starts_with('-') && *text != "-");
        let Some(text) = text.filter(|text| *text != "--") else {
            // The program, or the end of the options; other commands go on after their arguments.
            let ends = runs || word == "--";
            done.push(word);
            if ends {
                break;
            }
            continue;
        };
        let dashes = if text.starts_with("--") { 2 } else { 1 };
        let (name, value) = match text[dashes..].split_once('=') {
            Some((name, value)) => (name, Some(OsString::from(value))),
            None => (&text[dashes..], None),
        };
        let is_letter = name.chars().count() == 1;
        let known = find(name).filter(|_| !is_letter || dashes == 1 || name == "n");
        // Own options go first, except for a known word of several letters after one dash.
        let is_word = dashes == 1 && !is_letter && known.is_some();
        if let Some(values) = own.values(text).filter(|_| !is_word) {
            done.push(word);
            done.extend(words.by_ref().take(values));
            continue;
        }
        let known = known.filter(|(_, row)| !own.opaque || (is_word && matches!(row.2, Is(_))));
        let Some((launcher, row)) = known else {
            if dashes == 1 && text.starts_with("-h") && !is_letter {
                let what = format!("unexpected option '{text}'");
                return Err(CommandError::usage(what).hint("long options begin with two dashes"));
            }
            done.push(word);
            continue;
        };
        let shown = text.split('=').next().unwrap_or(text).to_owned();
        let mut values: Vec<OsString> = value.into_iter().collect();
        values.extend(words.by_ref().take(row.1.saturating_sub(values.len())));
        if values.len() < row.1 {
            return Err(CommandError::usage(format!("{shown} needs a value")));
        }
        let refuse = |why: &str| {
            CommandError::usage(format!("{shown} is an option of {launcher}")).hint(why)
        };
        match row.2 {
            Is(option) | Flag(option) if !own.has(option) => {
                return Err(refuse(&format!("this command has no {option}")));
            }
            Is(option) | Flag(option) => {
                done.push(option.into());
                done.append(&mut values);
            }
            Always => {}
            AlwaysWith(value, why) => {
                if values.iter().any(|given| given != value) {
                    return Err(refuse(why));
                }
            }
            Variable(name, times) => done.extend(setting(&shown, name, &values[0], times)?),
            Switch(name) => done.extend(setting(&shown, name, &"1".into(), 1)?),
            Exports if !own.has(VARIABLE) => return Err(refuse("this command has no -x")),
            Exports => done.extend([VARIABLE.into(), values.join(OsStr::new("="))]),
            Refused(why) => return Err(refuse(why)),
        }
    }
    done.extend(words);
    Ok(done)
}

/// Reads the words of a command line. Wrong words, and a question for help, end the process.
pub fn parse<C: Parser>(words: Vec<OsString>) -> C {
    C::try_parse_from(words).unwrap_or_else(|error| without_tip(error).exit())
}

/// Removes clap's advice to write a misspelt option after `--`, where it would be the program.
fn without_tip(mut error: clap::Error) -> clap::Error {
    if error.kind() == ErrorKind::UnknownArgument {
        error.remove(ContextKind::Suggested);
    }
    error
}

/// The option for the setting that a variable of Horovod would change.
fn setting(
    option: &str,
    variable: &str,
    value: &OsString,
    times: u64,
) -> Result<Vec<OsString>, CommandError> {
    let value = value.to_string_lossy().into_owned();
    let scaled = value.parse::<u64>().ok().filter(|_| times > 1);
    let given = scaled.map_or(value.clone(), |number| number.saturating_mul(times).to_string());
    let environment = HashMap::from([(variable.to_owned(), given)]);
    if !horovod::without_effect(&environment).is_empty() {
        let what = format!("{option} has no counterpart");
        return Err(CommandError::usage(what).hint("docs/horovod.md lists those that have one"));
    }
    let settings = horovod::settings(KEYS, &environment)
        .map_err(|error| CommandError::usage(format!("{option} {value}: {error}")))?;
    let options = settings
        .into_iter()
        .flat_map(|(key, value, _)| ["--set".into(), OsString::from(format!("{key}={value}"))]);
    Ok(options.collect())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::{Cli, Run};

    fn translated(line: &str) -> Result<String, String> {
        let words = line.split(' ').map(OsString::from).collect();
        let join = |words: Vec<OsString>| {
            words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
        };
        translate(&Cli::command(), words).map(join).map_err(|error| {
            assert_eq!(error.code, 2, "{line}");
            error.to_string().replace('\n', " ")
        })
    }

    #[test]
    fn each_option_is_translated_or_explained() {
        for (launcher, rows) in LAUNCHERS {
            for (names, values, meaning) in rows {
                for name in *names {
                    let dashes = if name.chars().count() == 1 { "-" } else { "--" };
                    let values = match meaning {
                        AlwaysWith(value, _) => format!(" {value}"),
                        Exports if *values == 1 => " A=1".to_owned(),
                        Variable("HOROVOD_LOG_LEVEL", _) => " INFO".to_owned(),
                        Is("--bind-to") => " core".to_owned(),
                        _ => " 1".repeat(*values),
                    };
                    let line = format!("gradwire run {dashes}{name}{values} train -h");
                    match translated(&line) {
                        Ok(text) => {
                            assert!(!matches!(meaning, Refused(_)), "{line}: {text}");
                            let words = text.split(' ').map(OsString::from);
                            let parsed = Cli::try_parse_from(words);
                            assert!(parsed.is_ok(), "{line} became {text}: {parsed:?}");
                        }
                        Err(text) => {
                            let is = matches!(meaning, Refused(_) | Variable(..));
                            assert!(is, "{line}: {text}");
                            assert!(text.contains(launcher) || text.contains("no counterpart"));
                            assert!(text.contains(" hint: "), "{line}: {text}");
                            assert!(text.lines().all(|line| line.len() <= 160), "{text}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_misspelt_option_is_not_for_the_program() {
        for (line, expected) in [
            ("gradwire run --use-mpi train", "unexpected argument '--use-mpi' found"),
            ("gradwire run --slots 2 train", "a similar argument exists: '--slots-per-host'"),
            ("gradwire status --watc", "a similar argument exists: '--watch'"),
        ] {
            let error = without_tip(Cli::try_parse_from(line.split(' ')).unwrap_err()).to_string();
            assert!(error.contains(expected) && !error.contains("as a value"), "{error}");
        }
    }

    fn run(line: &str) -> Run {
        let words = line.split(' ').map(OsString::from).collect();
        let words = translate(&Cli::command(), words).unwrap();
        match Cli::try_parse_from(words).unwrap().command {
            crate::args::Command::Run(run) => *run,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_programs_own_options_are_left_alone() {
        let parsed = run("gradwire run -H a:2 --verbose -np 4 train -np 7 --verbose -H x");
        assert_eq!(
            (parsed.at.np, parsed.at.hosts.as_deref(), parsed.at.verbose),
            (Some(4), Some("a:2"), true)
        );
        assert_eq!(parsed.command, ["train", "-np", "7", "--verbose", "-H", "x"]);
        let parsed = run("gradwire run --np=2 -- -np x");
        assert_eq!((parsed.at.np, parsed.command.len()), (Some(2), 2));
        assert_eq!(run("gradwire run -n3 train").at.np, Some(3));
        let parsed = run("gradwire run -np=3 train -np=4");
        assert_eq!(
            (parsed.at.np, parsed.command),
            (Some(3), vec![OsString::from("train"), "-np=4".into()])
        );
        assert_eq!(run("gradwire run --start-timeout 1.5 train").at.start_timeout, Some(1500));
    }

    #[test]
    fn variables_are_checked_and_need_a_program() {
        let parse = |words: &[&str]| {
            let words = [&["gradwire", "run"], words].concat().into_iter().map(OsString::from);
            let words = translate(&Cli::command(), words.collect()).unwrap();
            Cli::try_parse_from(words).map_err(|error| error.to_string())
        };
        let parsed = run("gradwire run -x A=b=-c -x PATH -genv B 2 train -x C=3");
        let pair = |name: &str, value: Option<&str>| (name.to_owned(), value.map(str::to_owned));
        let expected = [pair("A", Some("b=-c")), pair("PATH", None), pair("B", Some("2"))];
        assert_eq!(parsed.variables, expected);
        assert_eq!(parsed.command, ["train", "-x", "C=3"]);
        for (words, expected) in [
            (&["-np", "2", "-x", "A=1", "--"][..], "<PROGRAM>"),
            (&["-x", "A=1"], "<PROGRAM>"),
            (&["-x", "=5", "train"], "expected NAME=VALUE, and a name"),
            (&["-x", "", "train"], "expected NAME=VALUE, and a name"),
            (&["-x", "A B=1", "train"], "expected NAME=VALUE, and a name"),
            (&["-genv", "A B", "1", "train"], "expected NAME=VALUE, and a name"),
            (&["-x", "-np", "2", "train"], "a value is required for '--variable"),
        ] {
            let error = parse(words).unwrap_err();
            assert!(error.contains(expected), "{words:?}: {error}");
        }
    }

    #[test]
    fn familiar_lines_become_ours() {
        for (line, expected) in [
            ("run -np 4 train -np 7", "run --np 4 train -np 7"),
            ("run -np=4 -hostfile h train", "run --np 4 --hostfile h train"),
            ("run -n 2 -host a:1,b:1 train", "run -n 2 --hosts a:1,b:1 train"),
            ("run --n 2 -- -np x", "run --np 2 -- -np x"),
            (
                "run --nproc_per_node=4 --nnodes 1 --standalone --use_env train",
                "run --nproc-per-node 4 train",
            ),
            ("run -N 2 -p 22 -i key train", "run -N 2 --ssh-port 22 --ssh-identity-file key train"),
            ("run --wd /a --nics eth0 t", "run --wdir /a --set data.interface=eth0 t"),
            ("run --prefix-timestamp -m train -m", "run --timestamp-output -m train -m"),
            ("run -cb", "run --check-build"),
            ("run --log-level WARNING train", "run --set log.level=warn train"),
            (
                "run --fusion-threshold-mb 32 train",
                "run --set negotiation.piece_bytes=33554432 train",
            ),
            (
                "run --stall-check-warning-time-seconds=7 train",
                "run --set negotiation.stall_warning_ms=7000 train",
            ),
            ("run -x PATH -x A=1 -genv B 2 train x", "run -x PATH -x A=1 --variable B=2 train x"),
            ("run -env A 1 -- train", "run --variable A=1 -- train"),
            ("run --bind-to none --oversubscribe -q train", "run --bind-to none train"),
            ("run --set a.b=-np -v train", "run --set a.b=-np -v train"),
            (
                "run --min-np 1 --blacklist-cooldown-range 1 9 -np 2 train -np 7",
                "run --min-np 1 --blacklist-cooldown-range 1 9 --np 2 train -np 7",
            ),
            ("run -vh", "run -vh"),
            ("bench barrier -np 2 -i 3", "bench barrier --np 2 -i 3"),
            ("doctor -hostfile h --json", "doctor --hostfile h --json"),
            ("probe -np 2 --out f", "probe --np 2 --out f"),
            ("status -np", "status -np"),
        ] {
            let whole = format!("gradwire {line}");
            assert_eq!(translated(&whole), Ok(format!("gradwire {expected}")), "{line}");
        }
    }

    #[test]
    fn a_refused_option_names_what_to_do() {
        for (line, expected) in [
            ("run --nnodes 2 train", "--nnodes is an option of torchrun hint: gradwire run is"),
            ("run --cpu-set 1 train", "--cpu-set is an option of mpirun hint: --bind-to core or"),
            ("run --mca a b train", "does not use MPI"),
            ("run --cycle-time-ms 1 train", "works without cycles"),
            ("run --log-level loud train", "--log-level loud: "),
            ("run --max-restarts 3 train", "with --min-np N the job continues"),
            ("run -hostfil x", "unexpected option '-hostfil' hint: long options"),
            ("run -hostfile", "-hostfile needs a value"),
            ("bench barrier -x A=1", "-x is an option of mpirun hint: this command has no -x"),
        ] {
            let error = translated(&format!("gradwire {line}")).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
