{{- define "gradwire.labels" -}}
app.kubernetes.io/name: gradwire
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gradwire.secret" -}}
{{ .Values.secret.name | default .Release.Name }}
{{- end }}

{{- /* The name of the pod with rank 0, in the network of the job. */ -}}
{{- define "gradwire.first" -}}
{{- if eq .Values.kind "jobset" -}}
{{ .Release.Name }}-node-0-0.{{ .Release.Name }}
{{- else -}}
{{ .Release.Name }}-0.{{ .Release.Name }}
{{- end -}}
{{- end }}

{{- /* How many there are. The Trainer of Kubeflow sets these variables itself. */ -}}
{{- define "gradwire.places" -}}
- {name: PET_NNODES, value: "{{ .Values.nodes }}"}
- {name: PET_NPROC_PER_NODE, value: "{{ .Values.ranksPerNode }}"}
- {name: PET_MASTER_ADDR, value: {{ include "gradwire.first" . }}}
- {name: PET_MASTER_PORT, value: "{{ .Values.port }}"}
{{- end }}

{{- /* The pod of a node. */ -}}
{{- define "gradwire.pod" -}}
restartPolicy: Never
terminationGracePeriodSeconds: {{ add .Values.graceSeconds 10 }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.user }}
  runAsGroup: {{ .Values.user }}
  fsGroup: {{ .Values.user }}
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: node
    image: {{ .Values.image }}
    imagePullPolicy: {{ .Values.imagePullPolicy }}
    command: {{ concat (list "gradwire" "join" "--") .Values.program | toJson }}
    env:
      {{- if ne .Values.kind "kubeflow" }}
      {{- include "gradwire.places" . | nindent 6 }}
      {{- end }}
      - {name: GRADWIRE_SECRET_FILE, value: /run/secrets/gradwire/{{ .Values.secret.key }}}
      - {name: GRADWIRE_LAUNCH__START_TIMEOUT_MS, value: "{{ .Values.startTimeoutSeconds }}000"}
      - {name: GRADWIRE_LAUNCH__GRACE_MS, value: "{{ .Values.graceSeconds }}000"}
      - {name: GRADWIRE_METRICS__LISTEN, value: "0.0.0.0:9401"}
      - {name: HOME, value: /tmp}
      {{- with .Values.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - {name: metrics, containerPort: 9401}
    # The daemon answers once it has started; it may wait for other pods then.
    startupProbe:
      httpGet: {path: /healthz, port: metrics}
      periodSeconds: 2
      failureThreshold: {{ max 30 (div .Values.startTimeoutSeconds 2) }}
    livenessProbe:
      httpGet: {path: /healthz, port: metrics}
      periodSeconds: 10
      failureThreshold: 6
    readinessProbe:
      httpGet: {path: /readyz, port: metrics}
      periodSeconds: 5
    resources: {{- toYaml .Values.resources | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    volumeMounts:
      - {name: secret, mountPath: /run/secrets/gradwire, readOnly: true}
      - {name: tmp, mountPath: /tmp}
      - {name: shm, mountPath: /dev/shm}
      {{- with .Values.volumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  - name: secret
    secret: {secretName: {{ include "gradwire.secret" . }}, defaultMode: 288}  # 0440
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
  {{- with .Values.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- /* An indexed Job with one pod for each node. */ -}}
{{- define "gradwire.job" -}}
completionMode: Indexed
completions: {{ .Values.nodes }}
parallelism: {{ .Values.nodes }}
# A job goes on with all its ranks or not at all.
backoffLimit: 0
template:
  metadata:
    labels: {{- include "gradwire.labels" . | nindent 6 }}
  spec:
    {{- if eq .Values.kind "job" }}
    subdomain: {{ .Release.Name }}
    {{- end }}
    {{- include "gradwire.pod" . | nindent 4 }}
{{- end }}
