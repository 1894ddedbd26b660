//! The rules of an elastic job, from the options of `gradwire run`. Pure.

use std::time::Duration;

use gradwire_settings::Settings;

use super::hosts::Host;
use crate::{args::ElasticOptions, error::CommandError};

/// The first and the longest quarantine of a slot by default.
const COOLDOWN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// How the membership of a job may change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elastic {
    /// All hosts, also those that no rank needs at first.
    pub hosts: Vec<Host>,
    /// An epoch has at least this many ranks.
    pub min: u32,
    /// And at most this many.
    pub max: u32,
    /// How many more processes are kept ready.
    pub spares: u32,
    /// How long it may take until enough ranks continue.
    pub timeout: Duration,
    /// How many epochs may follow the first.
    pub reset_limit: Option<u32>,
    /// How many epochs may end because of losses of daemons alone.
    pub restarts: u32,
    /// The first and the longest time of a quarantine.
    pub cooldown: (Duration, Duration),
    /// How long a host may take to answer.
    pub reach: Duration,
}

impl Elastic {
    /// The rules of a job on these hosts, or this machine, and the number of ranks of its first
    /// epoch; `None` if the options do not make it elastic. `np` is the number that the user wants;
    /// a script that lists too few hosts at first gives fewer.
    ///
    /// # Errors
    /// [`CommandError`] for options that contradict each other or the hosts.
    pub fn new(
        options: &ElasticOptions,
        np: Option<u32>,
        hosts: &[Host],
        settings: &Settings,
    ) -> Result<Option<(Self, u32)>, CommandError> {
        if !options.is_elastic() {
            return match options.only_elastic() {
                Some(option) => Err(CommandError::usage(format!("{option} is for elastic jobs"))
                    .hint("make the job elastic with --min-np N, the fewest ranks it may have")),
                None => Ok(None),
            };
        }
        let is_listed = options.host_discovery_script.is_some();
        let spares = options.spares.unwrap_or(0);
        let slots = hosts.iter().fold(0, |all: u32, host| all.saturating_add(host.slots));
        let fits = slots.saturating_sub(spares);
        let np = match (np, slots) {
            (Some(np), _) => np,
            (None, 0) => options.min_np.or(options.max_np).unwrap_or(1),
            (None, _) => fits.min(options.max_np.unwrap_or(u32::MAX)),
        };
        let (min, max) = (options.min_np.unwrap_or(np), options.max_np.unwrap_or(np));
        let contradiction = |what: String| Err(CommandError::usage(what));
        if min > max {
            return contradiction(match (options.min_np, options.max_np) {
                (None, _) => format!("-np {np} is more than --max-np {max}"),
                (_, Some(_)) => format!("--min-np {min} is more than --max-np {max}"),
                (_, None) => format!("--min-np {min} is more than the {np} ranks of the job"),
            });
        }
        if np < min {
            return contradiction(format!("-np {np} is less than --min-np {min}"));
        }
        if np > max {
            return contradiction(format!("-np {np} is more than --max-np {max}"));
        }
        let most = max.saturating_add(spares);
        let mut hosts = hosts.to_vec();
        if slots == 0 {
            hosts.insert(0, Host::new("localhost", most));
        } else if !is_listed && np.saturating_add(spares) > slots {
            let (ranks, spare) =
                (super::hosts::count(np, "rank"), super::hosts::count(spares, "spare"));
            let all = if spares == 0 { ranks } else { format!("{ranks} and {spare}") };
            let what = format!("{all} are more than the {slots} slots of the given hosts");
            return Err(CommandError::usage(what).hint("add hosts, or give the hosts more slots"));
        }
        let cooldown = match options.blacklist_cooldown_range.as_deref() {
            Some([first, longest]) if first > longest => {
                let (first, longest) = (first.as_secs_f64(), longest.as_secs_f64());
                return contradiction(format!(
                    "--blacklist-cooldown-range {first} {longest}: the first time must not be \
                     more than the second"
                ));
            }
            Some([first, longest]) => (*first, *longest),
            _ => COOLDOWN,
        };
        let first = if slots == 0 { np } else { np.min(fits) };
        let elastic = Self {
            hosts,
            min,
            max,
            spares,
            timeout: settings.elastic.timeout,
            reset_limit: options.reset_limit,
            restarts: settings.recovery.restarts,
            cooldown,
            reach: settings.start.timeout,
        };
        Ok(Some((elastic, first)))
    }

    /// The quarantine after this many faults in a row.
    pub fn quarantine(&self, faults: u32) -> Duration {
        let (first, longest) = self.cooldown;
        first.saturating_mul(1 << faults.saturating_sub(1).min(20)).min(longest)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{args::JobOptions, launch::hosts::parse_list};

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        at: JobOptions,
        #[command(flatten)]
        elastic: ElasticOptions,
    }

    fn rules(line: &str, hosts: &str) -> Result<Option<(Elastic, u32)>, String> {
        let words = ["run"].into_iter().chain(line.split_whitespace());
        let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        let hosts = if hosts.is_empty() { Vec::new() } else { parse_list(hosts).unwrap() };
        Elastic::new(&line.elastic, line.at.np, &hosts, &Settings::default())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_limits_of_ranks_have_defaults() {
        let limits = |line: &str, hosts: &str| {
            let (rules, first) = rules(line, hosts).unwrap().unwrap();
            let slots: Vec<_> = rules.hosts.iter().map(|host| host.slots).collect();
            (rules.min, first, rules.max, rules.spares, slots)
        };
        assert_eq!(limits("--min-np 2 --np 4", ""), (2, 4, 4, 0, vec![4]));
        assert_eq!(limits("--min-np 2", ""), (2, 2, 2, 0, vec![2]));
        assert_eq!(limits("--min-np 2", "a:2,b:3"), (2, 5, 5, 0, vec![2, 3]));
        assert_eq!(limits("--min-np 2 --spares 1", "a:2,b:3"), (2, 4, 4, 1, vec![2, 3]));
        assert_eq!(limits("--max-np 4 --np 2 --spares 2", ""), (2, 2, 4, 2, vec![6]));
        let script = "--np 8 --min-np 2 --max-np 9 --host-discovery-script x";
        assert_eq!(limits(script, "a:3"), (2, 3, 9, 0, vec![3]));
        assert_eq!(rules("--np 2", "").unwrap(), None);
        let (rules, _) = rules("--min-num-proc 1 --max-num-proc 2 --np 2", "").unwrap().unwrap();
        let seconds = [1, 2, 3, 7, 99].map(|faults| rules.quarantine(faults).as_secs());
        assert_eq!(seconds, [1, 2, 4, 60, 60]);
    }

    #[test]
    fn contradictions_are_refused() {
        for (line, hosts, expected) in [
            ("--min-np 3 --max-np 2", "", "--min-np 3 is more than --max-np 2"),
            ("--min-np 3 --np 2", "", "--min-np 3 is more than the 2 ranks of the job"),
            ("--min-np 3 --np 2 --max-np 4", "", "-np 2 is less than --min-np 3"),
            ("--min-np 1 --np 5 --max-np 4", "", "-np 5 is more than --max-np 4"),
            ("--min-np 1 --np 3", "a:2", "3 ranks are more than the 2 slots of the given hosts"),
            (
                "--min-np 1 --np 2 --spares 1",
                "a:2",
                "2 ranks and 1 spare are more than the 2 slots of the given hosts",
            ),
            ("--spares 1 --np 2", "", "--spares is for elastic jobs"),
            ("--reset-limit 3", "", "--reset-limit is for elastic jobs"),
            (
                "--min-np 1 --blacklist-cooldown-range 5 2",
                "",
                "--blacklist-cooldown-range 5 2: the first time must not be more than the second",
            ),
            ("--min-np 1 --blacklist-cooldown-range 5", "", "2 values required"),
            ("--min-np 1 --slots-per-host 2", "", "--host-discovery-script"),
            ("--min-np 0", "", "expected the number of ranks, from 1 to 1048576"),
            ("--min-np 1 --max-np 4294967295", "", "expected the number of ranks, from 1 to"),
            ("--min-np 1 --spares 1048577", "", "1048577 is not in 0..=1048576"),
            (
                "--min-np 1 --host-discovery-script a --slots-per-host 4294967295",
                "",
                "4294967295 is not in 1..=1048576",
            ),
        ] {
            let error = rules(line, hosts).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
