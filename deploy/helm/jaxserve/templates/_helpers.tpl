{{- define "jaxserve.labels" -}}
app: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Labels of the pods that answer requests: of several hosts host 0. */ -}}
{{- define "jaxserve.serving" -}}
app: {{ .Release.Name }}
{{- if gt (int .Values.hosts) 1 }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}

{{- define "jaxserve.secretName" -}}
{{ .Values.auth.existingSecret | default .Release.Name }}
{{- end }}

{{- /* "true" if the cache has several pods. */ -}}
{{- define "jaxserve.isShared" -}}
{{- $isGroup := gt (int .Values.hosts) 1 }}
{{- if or $isGroup (gt (int .Values.replicas) 1) .Values.autoscaling.enabled (eq .Values.strategy "RollingUpdate") -}}
true
{{- end }}
{{- end }}

{{- define "jaxserve.accessMode" -}}
{{ .Values.cache.accessMode | default (ternary "ReadWriteMany" "ReadWriteOnce" (eq (include "jaxserve.isShared" .) "true")) }}
{{- end }}

{{- /* Options as they are served: the values', and what follows from other values. */ -}}
{{- define "jaxserve.options" -}}
{{- $options := deepCopy .Values.options }}
{{- $devices := ternary 1 (mul .Values.hosts .Values.accelerator.perHost) (eq .Values.accelerator.kind "none") | int }}
{{- if and (gt $devices 1) (not (hasKey $options "tp-size")) (not (hasKey $options "dp-size")) }}
{{- $_ := set $options "tp-size" $devices }}
{{- end }}
{{- if and (gt (int .Values.hosts) 1) (not (hasKey $options "dist-timeout")) }}
{{- $_ := set $options "dist-timeout" 1800 }}
{{- end }}
{{- toYaml $options }}
{{- end }}

{{- define "jaxserve.image" -}}
{{- $tags := dict "gpu" "cuda" "tpu" "tpu" "none" "cpu" }}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default (get $tags .Values.accelerator.kind)) }}
{{- end }}

{{- define "jaxserve.resources" -}}
{{- $names := dict "gpu" "nvidia.com/gpu" "tpu" "google.com/tpu" }}
{{- $resources := deepCopy .Values.resources }}
{{- if ne .Values.accelerator.kind "none" }}
{{- $resources = merge $resources (dict "limits" (dict (get $names .Values.accelerator.kind) .Values.accelerator.perHost)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- /* What no schema can say. */ -}}
{{- define "jaxserve.check" -}}
{{- if and (not .Values.auth.existingSecret) (not .Values.auth.apiKey) }}
{{- fail "auth.existingSecret names a Secret with api-key, or auth.apiKey is the key." }}
{{- end }}
{{- if and (gt (int .Values.hosts) 1) (not .Values.auth.existingSecret) (lt (len .Values.auth.distSecret) 16) }}
{{- fail "Several hosts share a secret: auth.distSecret has 16 characters or more, or auth.existingSecret has dist-secret." }}
{{- end }}
{{- if and (hasPrefix "/models/" (index .Values.options "model-path")) (not .Values.models.claim) }}
{{- fail "models.claim names the volume claim that is read at /models." }}
{{- end }}
{{- if and (include "jaxserve.isShared" .) (eq .Values.cache.accessMode "ReadWriteOnce") }}
{{- fail "Several pods share the cache: cache.accessMode must be ReadWriteMany, or empty." }}
{{- end }}
{{- if and (gt (int .Values.hosts) 1) (hasKey .Values.options "dp-size") }}
{{- fail "dp-size and several hosts do not go together: use replicas, which are servers of their own." }}
{{- end }}
{{- end }}
